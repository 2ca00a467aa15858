"""Grouped products of experts without gates equal products of one expert after the other."""

import pytest
import torch

from models.ops.experts.squared_moe import grouped_experts, squared_moe

T, E, H, INNER, TOP = 9, 5, 16, 24, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_single_experts(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(T, H).to(dtype)
    up, down = torch.randn(E, INNER, H).to(dtype), torch.randn(E, H, INNER).to(dtype)
    logits, bias = torch.randn(T, E), torch.randn(E)
    expected = squared_moe(hidden, logits, up, down, bias, TOP, True, 1.5, 1, 1)
    ids = (logits.sigmoid() + bias).topk(TOP).indices
    weights = logits.sigmoid().gather(1, ids)
    weights = 1.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(grouped_experts(hidden, weights, ids, up, down), expected)


def test_the_operator_fakes_its_output():
    arguments = (
        torch.randn(T, H), torch.randn(T, E), torch.randn(E, INNER, H), torch.randn(E, H, INNER),
        torch.randn(E), TOP, True, 1.0, 1, 1,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.octavo.squared_moe.default, arguments)
