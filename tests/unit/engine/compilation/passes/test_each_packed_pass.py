"""The pass of products with 4-bit weights leaves a graph's results as they are, for any shape."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import services.engine.compilation.program.inserted_operators  # noqa: F401  # registers them
from models.compile_support import support_torch_compile
from models.ops.products.packed_linear import packed_linear
from tests.support.compiled_models import compile_toy
from tests.support.packed_quantization import quantize_packed

EPS = 1e-5
FORMATS = {
    "int4": (32, {"has_zeros": True}),
    "mxfp4": (32, {"is_float": True}),
    "nvfp4": (16, {"is_float": True}),
}
runs = st.integers(1, 5)


@support_torch_compile()
class Toy(nn.Module):
    """Two products added to the stream, of which something else reads the second one, too."""

    def __init__(self, hidden, inner, seed, *, form, bias):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        group, options = FORMATS[form]
        self.norm = torch.randn(hidden, generator=generator)
        self.out = quantize_packed(
            torch.randn(hidden, inner, generator=generator), group, **options
        )
        self.bias = torch.randn(hidden, generator=generator) if bias else None

    def product(self, x):
        return packed_linear(x, *self.out, self.bias, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x[:, : len(self.norm)] * 2
        first = torch.ops.octavo.add_rms_norm(self.product(x), residual, self.norm, EPS)
        shared = self.product(x + 1)
        second = torch.ops.octavo.add_rms_norm(shared, residual, self.norm, EPS)
        return torch.cat((first, second, shared, residual), -1)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_packed_residual_alone_changes_no_result(form, data):
    inner = 32 * data.draw(runs)
    hidden = data.draw(st.integers(1, inner))
    toy = Toy(hidden, inner, data.draw(runs), form=form, bias=data.draw(st.booleans()))
    fused = copy.copy(toy)
    stats = compile_toy(fused, 2, width=inner, passes=["packed_residual"])
    assert stats.pass_matches == {"packed_residual": 1}
    for num_tokens in (1, 2, data.draw(st.integers(3, 70))):
        x = torch.randn(num_tokens, inner)
        torch.testing.assert_close(fused.forward(x), toy(x), rtol=1e-4, atol=1e-4)
