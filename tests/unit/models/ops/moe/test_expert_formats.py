import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.number_formats import BLOCK, FP8
from models.ops.moe.expert_formats import expert_values
from models.ops.operands.packed_weights import to_kernel_order
from tests.support.moe_case import tiled


def test_packed_mxfp4_has_the_numbers_that_transformers_reads():
    blocks = torch.randint(256, (3, 16, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 16, 5), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    for expert in range(3):
        packed = to_kernel_order(blocks[expert].flatten(-2), is_float=True)
        actual = expert_values(packed, tiled([scales[expert]]), torch.float32)
        assert torch.equal(actual, expected[expert])


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
