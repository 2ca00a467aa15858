"""Passes of FP8 weights and of ranks leave a graph's results as they are, for any shape."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import services.engine.compilation.program.inserted_operators  # noqa: F401  # registers them
from models.compile_support import support_torch_compile
from models.number_formats import BLOCK, FP8
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.collectives import without_other_ranks
from tests.support.compiled_models import compile_toy

EPS = 1e-5
GROUP = "tensor_parallel"
sizes = st.integers(1, 300)
BF16_TOLERANCE = 0.02
"""Of a result's norm: both sides round to FP8, and an element may round the other way."""


class Weights:
    """FP8 weights with scales by row or by block, and parameters in bf16."""

    def __init__(self, seed, *, is_blocked, bias):
        self._draws = torch.Generator().manual_seed(seed)
        self._is_blocked, self._bias = is_blocked, bias

    def plain(self, *shape):
        return torch.randn(shape, generator=self._draws).bfloat16()

    def product(self, rows, columns):
        """Returns a weight, its bias and its scale."""
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if self._is_blocked else (rows, 1)
        scale = torch.rand(shape, generator=self._draws) + 0.5
        weight = torch.randn(rows, columns, generator=self._draws).to(FP8)
        return weight, self.plain(rows) if self._bias else None, scale


@support_torch_compile()
class Toy(nn.Module):
    """Runs a body with drawn weights."""

    def __init__(self, body, weights, hidden, inner):
        super().__init__()
        self.body = body
        self.norm, self.last_norm = weights.plain(hidden), weights.plain(hidden)
        self.out = weights.product(hidden, hidden)
        self.gate_up = weights.product(2 * inner, hidden)
        self.down = weights.product(hidden, inner)
        self.next = weights.product(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def norm_of_a_sum(toy, x):
    """Two norms of sums, a plain and a gated product, and the sum itself."""
    residual = x * 2
    normed = torch.ops.octavo.add_rms_norm(x, residual, toy.norm, EPS)
    y = linear(normed, toy.next[0], toy.next[1], toy.next[2])
    normed = torch.ops.octavo.add_rms_norm(x, residual, toy.last_norm, EPS)
    gated = gated_linear(normed, toy.gate_up[0], toy.gate_up[1], toy.gate_up[2])
    return torch.cat((y, gated, residual), -1)


def feed_forward(toy, x):
    """Attention's product and both of a feed-forward layer, with the next product after them."""
    residual = x * 2
    out, gate_up, down, following = toy.out, toy.gate_up, toy.down, toy.next
    inner = torch.ops.octavo.linear_residual_norm_linear(
        residual, x, out[0], out[1], toy.norm, EPS, gate_up[0], gate_up[1], True,
        out[2], gate_up[2],
    )  # fmt: skip
    y = torch.ops.octavo.linear_residual_norm_linear(
        residual, inner, down[0], down[1], toy.last_norm, EPS, following[0], following[1], False,
        down[2], following[2],
    )  # fmt: skip
    return torch.cat((y, residual), -1)


def last_feed_forward(toy, x):
    """The same where only the model's last norm follows."""
    residual = x * 2
    out, gate_up, down = toy.out, toy.gate_up, toy.down
    inner = torch.ops.octavo.linear_residual_norm_linear(
        residual, x, out[0], out[1], toy.norm, EPS, gate_up[0], gate_up[1], True,
        out[2], gate_up[2],
    )  # fmt: skip
    y = torch.ops.octavo.linear_residual_norm(
        residual, inner, down[0], down[1], toy.last_norm, EPS, down[2]
    )
    return torch.cat((y, residual), -1)


@pytest.mark.parametrize(
    ("name", "body", "count"),
    [
        ("norm_quant", norm_of_a_sum, 2),
        ("activation_quant", feed_forward, 1),
        ("activation_quant", last_feed_forward, 1),
    ],
)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_pass_of_rounded_products_alone_changes_no_result(name, body, count, data):
    hidden, inner, seed = (data.draw(sizes) for _ in range(3))
    weights = Weights(seed, is_blocked=data.draw(st.booleans()), bias=data.draw(st.booleans()))
    toy = Toy(body, weights, hidden, inner)
    fused = copy.copy(toy)
    x = torch.zeros(8, hidden, dtype=torch.bfloat16)
    stats = compile_toy(fused, 2, example=x, passes=[name])
    assert stats.pass_matches == {name: count}
    for num_tokens in (1, 2, data.draw(st.integers(3, 140))):
        x = torch.randn(
            num_tokens, hidden, generator=torch.Generator().manual_seed(seed)
        ).bfloat16()
        actual, expected = fused.forward(x).float(), body(toy, x).float()
        assert (actual - expected).norm() <= BF16_TOLERANCE * expected.norm()


def sums_over_ranks(toy, x):
    """Two sums over ranks, each of a product, each with a norm, and the stream itself."""
    stream = x * 2
    normed = rms_norm(stream, toy.norm, EPS)
    stream = stream + all_reduce(linear(normed, toy.out, None), GROUP)
    normed = rms_norm(stream, toy.norm, EPS)
    inner = linear(normed, toy.up, toy.bias)
    stream = all_reduce(linear(inner, toy.down, None), GROUP) + stream
    return torch.cat((rms_norm(stream, toy.last_norm, EPS), stream), -1)


@support_torch_compile()
class Ranked(nn.Module):
    """One rank's share of a layer, in float32."""

    def __init__(self, hidden, inner, seed):
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        shapes = {"norm": (hidden,), "last_norm": (hidden,), "out": (hidden, hidden),
                  "up": (inner, hidden), "bias": (inner,), "down": (hidden, inner)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape, generator=draws))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sums_over_ranks(self, x)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_fused_sums_over_ranks_change_no_result(data):
    hidden, inner, seed = (data.draw(st.integers(1, 40)) for _ in range(3))
    toy = Ranked(hidden, inner, seed)
    fused = copy.copy(toy)
    with without_other_ranks():
        stats = compile_toy(fused, 2, width=hidden, passes=["all_reduce_norm"])
        assert stats.pass_matches == {"all_reduce_norm": 2}
        for num_tokens in (1, 2, data.draw(st.integers(3, 70))):
            x = torch.randn(num_tokens, hidden)
            expected = sums_over_ranks(toy, x)
            torch.testing.assert_close(fused.forward(x), expected, rtol=1e-4, atol=1e-4)
