"""Grouped products of experts with a gelu equal products of one expert after the other."""

import pytest
import torch

from models.kernels.experts.torch_experts import apply_by_torch
from models.operands.experts import ExpertWeights
from models.ops.experts.gelu_moe import gelu_moe

T, E, H, TOP = 9, 5, 16, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [24, 21])
def test_grouped_products_are_those_of_single_experts(inner, dtype):
    torch.manual_seed(0)
    hidden = torch.randn(T, H).to(dtype)
    gate_up, down = torch.randn(E, 2 * inner, H).to(dtype), torch.randn(E, H, inner).to(dtype)
    logits, scale = torch.randn(T, E), torch.rand(E) + 0.5
    expected = gelu_moe(hidden, logits, scale, gate_up, down, TOP)
    weights, ids = logits.softmax(-1).topk(TOP)
    weights = weights / weights.sum(-1, keepdim=True) * scale[ids]
    grouped = torch.empty_like(hidden)
    experts = ExpertWeights(gate_up=gate_up, down=down, is_gelu=True)
    apply_by_torch(hidden, weights, ids, experts, grouped)
    torch.testing.assert_close(grouped, expected)


def test_the_operator_fakes_its_output():
    arguments = (
        torch.randn(T, H), torch.randn(T, E), torch.ones(E), torch.randn(E, 48, H),
        torch.randn(E, H, 24), TOP,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.octavo.gelu_moe.default, arguments)
