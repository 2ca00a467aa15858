"""Grouped products of experts without gates equal products of one expert after the other."""

import pytest
import torch

from models.kernels.experts.torch_experts import apply_by_torch
from models.operands.experts import ExpertWeights
from models.ops.experts.squared_moe import squared_moe

T, E, H, INNER, TOP = 9, 5, 16, 24, 2


def routed(num_experts=E):
    """Returns logits, a correction bias, and the weights and ids that they choose."""
    logits, bias = torch.randn(T, num_experts), torch.randn(num_experts)
    ids = (logits.sigmoid() + bias).topk(TOP).indices
    weights = logits.sigmoid().gather(1, ids)
    return logits, bias, 1.5 * weights / weights.sum(-1, keepdim=True), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_single_experts(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(T, H).to(dtype)
    up, down = torch.randn(E, INNER, H).to(dtype), torch.randn(E, H, INNER).to(dtype)
    logits, bias, weights, ids = routed()
    expected = squared_moe(hidden, logits, up, down, None, None, bias, TOP, True, 1.5, 1, 1)
    output = torch.empty_like(hidden)
    experts = ExpertWeights(gate_up=up, down=down, is_squared=True)
    apply_by_torch(hidden, weights, ids, experts, output)
    torch.testing.assert_close(output, expected)


def test_experts_of_other_ranks_add_nothing():
    torch.manual_seed(0)
    hidden = torch.randn(T, H)
    up, down = torch.randn(E, INNER, H), torch.randn(E, H, INNER)
    logits, bias, weights, ids = routed()
    routing = bias, TOP, True, 1.5, 1, 1
    whole = squared_moe(hidden, logits, up, down, None, None, *routing)
    load = torch.zeros(E, dtype=torch.int64)
    parts = []
    for own in (range(3), range(3, 5)):
        slots = [own.index(each) if each in own else len(own) for each in range(E)]
        expert_map = torch.tensor(slots, dtype=torch.int32).unsqueeze(1)
        weights_of_own = up[own.start : own.stop], down[own.start : own.stop]
        part = squared_moe(
            hidden, logits, *weights_of_own, None, None, *routing, expert_map, load, False
        )
        grouped = torch.empty_like(hidden)
        experts = ExpertWeights(
            gate_up=weights_of_own[0], down=weights_of_own[1], is_squared=True, num_routed=E
        )
        apply_by_torch(hidden, weights, expert_map[:, 0].long()[ids], experts, grouped)
        torch.testing.assert_close(grouped, part)
        parts.append(part)
    torch.testing.assert_close(sum(parts), whole)
    assert torch.equal(load, 2 * ids.flatten().bincount(minlength=E))


def test_the_operator_fakes_its_output():
    arguments = (
        torch.randn(T, H), torch.randn(T, E), torch.randn(E, INNER, H), torch.randn(E, H, INNER),
        None, None, torch.randn(E), TOP, True, 1.0, 1, 1,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.octavo.squared_moe.default, arguments)
