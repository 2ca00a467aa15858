"""The plain operations against their formulas, in every dtype and at odd shapes."""

import pytest
import torch

from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.elementwise.rotary import rotary
from models.ops.elementwise.silu_and_mul import silu_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 2), (7, 12), (127, 34)]

pytestmark = [
    pytest.mark.parametrize("dtype", TOLERANCE, ids=str),
    pytest.mark.parametrize("shape", SHAPES, ids=str),
]


def random(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close(actual, exact):
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


def test_rms_norm_divides_by_the_root_mean_square(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(rms_norm(x, weight, 1e-6), exact * weight.double())


def test_add_rms_norm_adds_in_place_and_returns_the_norm_of_the_sum(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    residual = x.flip(0).clone()
    kept = residual.clone()
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, x + kept)
    assert torch.equal(normed, rms_norm(residual, weight, 1e-6))


def test_silu_and_mul_gates_the_second_half_with_the_first(shape, dtype):
    x = random(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(x), gate * gate.sigmoid() * up)


def test_rotary_turns_pairs_of_the_two_halves(shape, dtype):
    num_tokens, head_dim = shape
    x = random(num_tokens, 3, head_dim, dtype=dtype)
    angles = torch.arange(num_tokens)[:, None, None] * torch.linspace(1, 0.1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    turned = rotary(x, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    first, second = x.double().chunk(2, dim=-1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert_close(turned, exact)
