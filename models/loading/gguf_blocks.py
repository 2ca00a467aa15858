"""Converts the blocks of GGUF's tensor types to float32, with the bits of llama.cpp's converter.

A block is a run of neighbours in a row. The first axis of all functions is blocks.
Source: github.com/ggml-org/llama.cpp, gguf-py/gguf/quants.py and ggml/src/ggml-quants.c.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from models.gguf.tensor_types import TensorType

STRIP_ELEMENTS = 2**22
"""Elements that are converted at a time, as steps in float32 take many times a type's bytes."""
_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice those of E2M1; the scale is half."""

Blocks: TypeAlias = torch.Tensor


def dequantize(raw: torch.Tensor, kind: TensorType, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of rows of blocks, computed in float32 and rounded once.

    raw: [..., bytes of a row] uint8.
    Returns: [..., elements of a row] of `dtype`.
    """
    blocks = raw.reshape(-1, kind.num_bytes)
    convert = _CONVERT[kind.name]
    result = torch.empty(len(blocks), kind.block_size, dtype=dtype, device=raw.device)
    step = STRIP_ELEMENTS // kind.block_size
    for first in range(0, len(blocks), step):
        strip = slice(first, first + step)
        result[strip] = convert(blocks[strip])
    return result.view(*raw.shape[:-1], -1)


def block_scales(blocks: Blocks) -> torch.Tensor:
    """Returns the float16 at the start of blocks of Q4_0 and Q8_0, [blocks, 1]."""
    return _half(blocks, 0)


def integers_4(blocks: Blocks, start: int) -> torch.Tensor:
    """Returns 32 integers of 4 bits from byte `start` on: the lower halves of bytes come first."""
    return _shifted(blocks[:, start : start + 16], _NIBBLES, 0xF, 16)


def _half(blocks: Blocks, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _scale(blocks: Blocks, start: int) -> torch.Tensor:
    return _half(blocks, start).float()


def _shifted(packed: torch.Tensor, shifts: tuple[int, ...], mask: int, run: int) -> torch.Tensor:
    """Returns fields of bytes, [blocks, n] uint8: of each `run` bytes first all at shifts[0]."""
    amounts = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return ((packed.reshape(len(packed), -1, 1, run) >> amounts) & mask).flatten(1)


def _bits(packed: torch.Tensor, run: int) -> torch.Tensor:
    return _shifted(packed, tuple(range(8)), 1, run)


def _q4_0(blocks: Blocks) -> torch.Tensor:
    return _scale(blocks, 0) * (integers_4(blocks, 2).float() - 8)


def _q4_1(blocks: Blocks) -> torch.Tensor:
    return _scale(blocks, 0) * integers_4(blocks, 4).float() + _scale(blocks, 2)


def _fifth_bits(blocks: Blocks, start: int) -> torch.Tensor:
    """Returns 16 times bit i of 32 bits, for element i."""
    octets = blocks[:, start : start + 4]
    return _bits(octets, 1) << 4


def _q5_0(blocks: Blocks) -> torch.Tensor:
    q = integers_4(blocks, 6) | _fifth_bits(blocks, 2)
    return _scale(blocks, 0) * (q.float() - 16)


def _q5_1(blocks: Blocks) -> torch.Tensor:
    q = integers_4(blocks, 8) | _fifth_bits(blocks, 4)
    return _scale(blocks, 0) * q.float() + _scale(blocks, 2)


def _q8_0(blocks: Blocks) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _scale(blocks, 0)


def _q2_k(blocks: Blocks) -> torch.Tensor:
    scales, q = blocks[:, :16], _shifted(blocks[:, 16:80], _PAIRS, 3, 32)
    low = (_scale(blocks, 80) * (scales & 0xF).float()).unsqueeze(-1)
    minimum = (_scale(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    return (low * q.view(-1, 16, 16).float() - minimum).flatten(1)


def _q3_k(blocks: Blocks) -> torch.Tensor:
    lower = _shifted(blocks[:, 96:104], _NIBBLES, 0xF, 8)
    upper = _shifted(blocks[:, 104:108], _PAIRS, 3, 4) << 4
    scales = _scale(blocks, 108) * ((lower | upper).float() - 32)
    q = _shifted(blocks[:, 32:96], _PAIRS, 3, 32).float()
    q = q - 4 * (1 - _bits(blocks[:, :32], 32).float())
    return (scales.unsqueeze(-1) * q.view(-1, 16, 16)).flatten(1)


def _scales_and_minima(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the products of Q4_K's and Q5_K's 8 scales and minima, [blocks, 8, 1] each."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 0x3F, (high & 0xF) | (low >> 2 & 0x30)), 1).float()
    minima = torch.cat((middle & 0x3F, (high >> 4) | (middle >> 2 & 0x30)), 1).float()
    return (_scale(blocks, 0) * scales).unsqueeze(-1), (_scale(blocks, 2) * minima).unsqueeze(-1)


def _q4_k(blocks: Blocks) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    q = _shifted(blocks[:, 16:144], _NIBBLES, 0xF, 32).view(-1, 8, 32).float()
    return (scale * q - minimum).flatten(1)


def _q5_k(blocks: Blocks) -> torch.Tensor:
    scale, minimum = _scales_and_minima(blocks)
    lower = _shifted(blocks[:, 48:176], _NIBBLES, 0xF, 32)
    q = (lower | _bits(blocks[:, 16:48], 32) << 4).view(-1, 8, 32).float()
    return (scale * q - minimum).flatten(1)


def _q6_k(blocks: Blocks) -> torch.Tensor:
    lower = _shifted(blocks[:, :128], _NIBBLES, 0xF, 64)
    upper = _shifted(blocks[:, 128:192], _PAIRS, 3, 32) << 4
    scales = _scale(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    q = (lower | upper).view(-1, 16, 16).float() - 32
    return (scales.unsqueeze(-1) * q).flatten(1)


def _looked_up(indices: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=indices.device)[indices.int()]


def _iq4_nl(blocks: Blocks) -> torch.Tensor:
    return _scale(blocks, 0) * _looked_up(integers_4(blocks, 2), _IQ4_VALUES)


def _iq4_xs(blocks: Blocks) -> torch.Tensor:
    upper = _shifted(blocks[:, 2:4], _PAIRS, 3, 1) << 4
    lower = _shifted(blocks[:, 4:8], _NIBBLES, 0xF, 1)
    scales = _scale(blocks, 0) * ((lower | upper).float() - 32)
    q = _looked_up(_shifted(blocks[:, 8:136], _NIBBLES, 0xF, 16), _IQ4_VALUES)
    return (scales.unsqueeze(-1) * q.view(-1, 8, 32)).flatten(1)


def _mxfp4(blocks: Blocks) -> torch.Tensor:
    exponent = blocks[:, :1].int()
    # Half of 2^(exponent - 127), which is subnormal below 2.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _looked_up(integers_4(blocks, 1), _MXFP4_VALUES)


_CONVERT: dict[str, Callable[[Blocks], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
