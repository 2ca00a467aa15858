import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.number_formats import BLOCK, FP8
from models.operands.packed_weights import packed_values, to_kernel_order
from models.operands.run_scales import entry_group, fill_tiled, integer_words, tiled_shape
from models.ops.experts.expert_formats import expert_values
from tests.support.moe_case import tiled
from tests.support.packed_quantization import quantize_packed


def test_packed_mxfp4_has_the_numbers_that_transformers_reads():
    blocks = torch.randint(256, (3, 16, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 16, 5), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    for expert in range(3):
        packed = to_kernel_order(blocks[expert].flatten(-2), is_float=True)
        actual = expert_values(packed, tiled([scales[expert]]), torch.float32)
        assert torch.equal(actual, expected[expert])


@pytest.mark.parametrize("group", [32, 64, 96, 128, 384])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_stacked_integers_have_the_values_of_linear_layers(group, has_zeros):
    rows, size, columns = 16, 384, entry_group(group)
    tiled = torch.empty(tiled_shape(2 * rows, size, columns), dtype=torch.int32)
    weights, expected = [], []
    for part in range(2):
        packed = quantize_packed(torch.randn(rows, size), group, has_zeros=has_zeros)
        weight, scale, zero = packed
        words = integer_words(scale, zero).repeat_interleave(group // columns, -1)
        fill_tiled(tiled, words, part, 2)
        weights.append(weight)
        expected.append(packed_values(*packed, torch.float32))
    actual = expert_values(torch.cat(weights), tiled, torch.float32, num_parts=2)
    assert torch.equal(actual, torch.cat(expected))


@pytest.mark.parametrize("group", [16, 32])
def test_stacked_floats_have_the_values_of_linear_layers(group):
    parts = [quantize_packed(torch.randn(16, 352), group, is_float=True) for _ in range(2)]
    weights, scales, _ = zip(*parts, strict=True)
    expected = torch.cat([packed_values(*each, torch.float32) for each in parts])
    stacked = torch.cat(weights)
    actual = expert_values(stacked, tiled(scales, group), torch.float32, num_parts=2)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("rows", "size"), [(128, 256), (200, 130)])
def test_stacked_fp8_parts_have_blocks_of_their_own(rows, size):
    parts = [torch.randn(rows, size).to(FP8) for _ in range(2)]
    scales = [torch.rand(-(-rows // BLOCK), -(-size // BLOCK)) for _ in range(2)]
    together = expert_values(torch.cat(parts), torch.cat(scales), torch.float32, num_parts=2)
    for i, (part, scale) in enumerate(zip(parts, scales, strict=True)):
        row, column = torch.arange(rows) // BLOCK, torch.arange(size) // BLOCK
        expected = part.float() * scale[row][:, column]
        assert torch.equal(together[i * rows : (i + 1) * rows], expected)


def test_fp8_rows_may_have_a_scale_each():
    weight, scale = torch.randn(200, 130).to(FP8), torch.rand(200, 1)
    assert torch.equal(expert_values(weight, scale, torch.float32), weight.float() * scale)
