"""The order in memory of the scales of experts in 4 bits."""

import pytest
import torch

from models.operands.run_scales import (
    by_row,
    entry_group,
    fill_tiled,
    integer_words,
    scales_and_zeros,
    tiled_shape,
)

SIZES = pytest.mark.parametrize(("num_rows", "num_columns"), [(8, 32), (24, 288), (16, 512)])


def scales(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


@SIZES
def test_a_word_has_the_scales_of_128_columns(num_rows, num_columns):
    each = scales(num_rows, num_columns // 32)
    tiled = torch.full(tiled_shape(num_rows, num_columns), 7, dtype=torch.uint8)
    fill_tiled(tiled, each, 0, 1)
    for row in range(num_rows):
        for run in range(num_columns // 32):
            assert tiled[run // 4, row, run % 4] == each[row, run]
    assert tiled.int().sum() == each.int().sum()
    # Kernels read pairs of words.
    assert len(tiled) % 2 == 0


@SIZES
def test_eight_rows_of_gate_and_up_take_turns(num_rows, num_columns):
    gate, up = (scales(3, num_rows, num_columns // 32) for _ in range(2))
    tiled = scales(3, *tiled_shape(2 * num_rows, num_columns))
    for part, each in enumerate((gate, up)):
        fill_tiled(tiled, each, part, 2)
    assert torch.equal(tiled[:, 0, :8, 0], gate[:, :8, 0])
    assert torch.equal(tiled[:, 0, 8:16, 0], up[:, :8, 0])
    assert torch.equal(by_row(tiled, num_columns, 2), torch.cat((gate, up), dim=1))
    assert torch.equal(by_row(tiled[1], num_columns, 2), torch.cat((gate, up), dim=1)[1])


@pytest.mark.parametrize("group", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_word_of_integers_has_scale_and_zero_point(group, has_zeros):
    scale = torch.randn(8, 768 // group).to(torch.bfloat16)
    zero = torch.randint(16, scale.shape, dtype=torch.uint8) if has_zeros else None
    each = entry_group(group)
    words = integer_words(scale, zero).repeat_interleave(group // each, -1)
    assert words.shape == (8, 768 // each)
    assert group % each == 0
    lower, upper = words.view(torch.bfloat16).view(8, -1, 2).unbind(-1)
    assert torch.equal(lower, scale.repeat_interleave(group // each, 1))
    zeros = torch.full_like(scale, 8) if zero is None else zero.to(torch.bfloat16)
    assert torch.equal(upper, 128 + zeros.repeat_interleave(group // each, 1))
    assert torch.equal(scales_and_zeros(words)[0], lower)
    assert torch.equal(scales_and_zeros(words)[1], (upper - 128).to(torch.uint8))
    tiled = torch.zeros(tiled_shape(8, 768, each), dtype=torch.int32)
    fill_tiled(tiled, words, 0, 1)
    assert torch.equal(by_row(tiled, 768, 1), words)
