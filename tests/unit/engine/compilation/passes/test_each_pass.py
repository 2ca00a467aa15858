"""Each pass alone leaves a graph's results as they are, for any shape."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import models.ops.experts.moe  # noqa: F401  # registers the operator
from models.compile_support import support_torch_compile
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear
from services.engine.config.compilation import PASS_NAMES
from tests.support.compiled_models import compile_toy

EPS = 1e-5
sizes = st.integers(1, 9)


FOUND = {
    "canonical": 1,
    "linear_gate": 2,
    "multi_stream": 1,
    "linear_residual": 3,
    "residual_norm": 2,
    "norm_linear": 2,
    "clean_up": 3,
}
"""Matches of each pass alone in a Block."""
ELSEWHERE = {
    "test_each_attention_pass.py": {"attention_quant", "qk_norm_rope_cache"},
    "test_each_packed_pass.py": {"packed_residual"},
    "test_each_rounding_pass.py": {
        "norm_quant",
        "activation_quant",
        "all_reduce_norm",
    },
}
"""Passes that find nothing in a Block, by the file that tests them in the same way."""


@support_torch_compile()
class Block(nn.Module):
    """A stream, a product added to it, a gated product and a shared expert, all written plainly."""

    def __init__(self, hidden, inner, experts, seed, *, bias):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)

        self.norms = nn.ParameterList(parameter(hidden) for _ in range(4))
        self.gate_up, self.down = parameter(2 * inner, hidden), parameter(hidden, inner)
        self.out = parameter(hidden, hidden)
        self.biases = nn.ParameterList([parameter(2 * inner), parameter(hidden)] if bias else [])
        self.router = parameter(experts, hidden)
        self.experts = nn.ParameterList(
            [parameter(experts, 2 * inner, hidden), parameter(experts, hidden, inner)]
        )

    def mlp(self, x):
        first, second = self.biases if len(self.biases) else (None, None)
        return linear(silu_and_mul(linear(x, self.gate_up, first)), self.down, second)

    def moe(self, x):
        experts = (None,) * 5
        return torch.ops.octavo.fused_moe(
            x, linear(x, self.router, None), *self.experts, *experts, 1, False, True, 1.0, 1, 1,
            1.702, None, True,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        # Views that change nothing, and a value that nothing uses.
        x.reshape(x.shape).float().neg()
        x = x + linear(rms_norm(x, self.norms[0], EPS), self.out, None)
        x = self.mlp(rms_norm(x, self.norms[1], EPS)) + x
        normed = rms_norm(x, self.norms[2], EPS)
        x = x + (self.moe(normed) + self.mlp(normed))
        return functional.rms_norm(x, self.norms[3].shape, self.norms[3], EPS)


def test_every_pass_is_tested_alone():
    elsewhere = set().union(*ELSEWHERE.values())
    assert not elsewhere & FOUND.keys()
    assert elsewhere | FOUND.keys() == {*PASS_NAMES}
    for file, names in ELSEWHERE.items():
        text = Path(__file__).with_name(file).read_text()
        assert all(f'"{name}"' in text for name in names)


@pytest.mark.parametrize("name", FOUND)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_pass_alone_changes_no_result(name, data):
    hidden, inner, experts, seed = (data.draw(sizes) for _ in range(4))
    block = Block(hidden, inner, experts, seed, bias=data.draw(st.booleans()))
    fused = copy.copy(block)
    stats = compile_toy(fused, 2, width=hidden, passes=[name])
    assert stats.pass_matches == {name: FOUND[name]}
    for num_tokens in (1, 2, data.draw(st.integers(3, 70))):
        x = torch.randn(num_tokens, hidden)
        torch.testing.assert_close(fused.forward(x), block(x), rtol=1e-4, atol=1e-4)
