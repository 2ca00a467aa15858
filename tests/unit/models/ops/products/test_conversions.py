"""The bit patterns by which kernels convert weights of 8 and 4 bits to bfloat16."""

import torch

from models.number_formats import E2M1_VALUES, FP8


def bfloat16(bits):
    return bits.to(torch.int16).view(torch.bfloat16).double()


def test_moved_bits_of_e4m3_are_its_values():
    every = torch.arange(256, dtype=torch.uint8)
    exact = every.view(FP8).double()
    wide = every.int() << 8
    moved = bfloat16((wide >> 4 & 0x07F0) | (wide & 0x8000)) * 2.0**120
    is_number = exact == exact
    assert torch.equal(moved[is_number], exact[is_number])


def test_moved_bits_of_e2m1_are_its_values():
    nibbles = torch.arange(16, dtype=torch.int32)
    moved = bfloat16((nibbles << 6 & 0x01C0) | (nibbles << 12 & 0x8000)) * 2.0**126
    assert torch.equal(moved, torch.tensor(E2M1_VALUES).double())


def test_last_bits_of_a_significand_are_integers():
    nibbles = torch.arange(16, dtype=torch.int32)
    assert torch.equal(bfloat16(nibbles | 0x4300), 128 + nibbles.double())
