"""octavo::fused_moe_with_shared is fused_moe plus the layer that all tokens share."""

import pytest
import torch
from torch.nn import functional

from models.number_formats import BLOCK, FP8
from models.ops.experts.moe import fused_moe
from models.ops.experts.shared_expert import fused_moe_with_shared
from models.ops.products.linear import linear


def routed(num_tokens, hidden, inner, experts):
    rows = torch.randn(num_tokens, hidden), torch.randn(num_tokens, experts)
    weights = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    return *rows, *weights, *(None,) * 5, 2, False, True, 1.5, 1, 1, 1.702, None, True


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_shared_layer_with_biases_is_added(num_tokens):
    arguments = routed(num_tokens, 12, 5, 3)
    gate_up, first_bias = torch.randn(18, 12), torch.randn(18)
    down, second_bias = torch.randn(12, 9), torch.randn(12)
    output = fused_moe_with_shared(*arguments, gate_up, None, first_bias, down, None, second_bias)
    gate, up = functional.linear(arguments[0], gate_up, first_bias).chunk(2, -1)
    shared = functional.linear(functional.silu(gate) * up, down, second_bias)
    torch.testing.assert_close(output, fused_moe(*arguments) + shared)


def test_a_shared_layer_of_8_bits_is_added():
    hidden, inner = BLOCK, BLOCK
    arguments = routed(4, hidden, inner, 3)
    gate_up, down = torch.randn(2 * inner, hidden).to(FP8), torch.randn(hidden, inner).to(FP8)
    scales = torch.rand(2, 1), torch.rand(1, 1)
    output = fused_moe_with_shared(*arguments, gate_up, scales[0], None, down, scales[1], None)
    gate, up = linear(arguments[0], gate_up, None, scales[0]).chunk(2, -1)
    shared = linear(functional.silu(gate) * up, down, None, scales[1])
    torch.testing.assert_close(output, fused_moe(*arguments) + shared)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_gate_of_each_token_scales_the_shared_layer(num_tokens):
    arguments = routed(num_tokens, 12, 5, 3)
    gate_up, down, gate = torch.randn(18, 12), torch.randn(12, 9), torch.randn(1, 12)
    weights = gate_up, None, None, down, None, None
    output = fused_moe_with_shared(*arguments, *weights, gate)
    first, up = functional.linear(arguments[0], gate_up).chunk(2, -1)
    shared = functional.linear(functional.silu(first) * up, down)
    factor = functional.linear(arguments[0], gate).sigmoid()
    torch.testing.assert_close(output, fused_moe(*arguments) + factor * shared)
