"""Operators mutate the arguments that they declare, and fake the shapes of their outputs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from models.number_formats import FP8
from models.ops.elementwise import (  # noqa: F401  # register
    gated_rms_norm,
    local_embedding,
    rms_norm,
    rotary,
    sigmoid_gate,
    silu_and_mul,
)
from models.ops.products import (  # noqa: F401  # register
    feed_forward,
    linear,
    linear_residual,
    norm_linear,
)

EPS = 1e-6
T, H, K, N = 5, 24, 12, 16


def stream():
    return [torch.randn(T, H), torch.randn(T, K), torch.randn(H, K)]


def samples():
    """Yields each operator with arguments of T tokens, strided where they may be."""
    gain, bias = torch.randn(H), torch.randn(H)
    after = torch.randn(2 * N, H)
    heads = torch.randn(T, 5, 20)[:, 1:4, 4:16]
    rotation = torch.randn(T, 1, 24).chunk(2, dim=-1)
    yield "rms_norm", (torch.randn(T, H), gain, EPS)
    yield "rms_norm", (heads, torch.randn(12), EPS)
    yield "add_rms_norm", (torch.randn(T, H), torch.randn(T, H), gain, EPS)
    yield "silu_and_mul", (torch.randn(T, 2 * N),)
    yield "silu_and_mul", (torch.randn(T, 4 * N)[:, N : 3 * N],)
    wide = torch.randn(T, 3 * H)
    for weight in (torch.randn(8), torch.randn(3, 8)):
        yield "gated_rms_norm", (torch.randn(T, H), wide[:, H:-H], weight, EPS, True, False)
        yield "gated_rms_norm", (torch.randn(T, H), wide[:, H:-H], weight, EPS, False, True)
    yield "sigmoid_gate", (torch.randn(T, H), wide[:, H:-H])
    yield "local_embedding", (torch.arange(T), torch.randn(N, H), 2)
    yield "rotary", (heads, *rotation)
    yield "rotary", (heads.transpose(1, 2).contiguous().transpose(1, 2), *rotation)
    for given in (bias, None):
        yield "linear", (torch.randn(T, K), torch.randn(H, K), given)
        yield "linear_residual", (*stream(), given)
        yield "linear_residual_norm", (*stream(), given, gain, EPS)
        for is_gated in (True, False):
            yield (
                "linear_residual_norm_linear",
                (*stream(), given, gain, EPS, after, None, is_gated),
            )
    for given in (torch.randn(2 * N), None):
        yield "gated_linear", (torch.randn(T, H), after, given)
        for is_gated in (True, False):
            yield "norm_linear", (torch.randn(T, H), gain, EPS, after, given, is_gated)


def samples_of_8_bits():
    """Yields the operators with products, with FP8 weights."""
    gain, rows = torch.randn(H), torch.rand(H, 1)
    residual, x, weight = stream()
    first, after = weight.to(FP8), torch.randn(2 * N, H).to(FP8)
    after_rows = torch.rand(2 * N, 1)
    yield "linear", (x, first, None, rows)
    yield "gated_linear", (residual, after, None, after_rows)
    yield "norm_linear", (residual, gain, EPS, after, None, True, after_rows)
    for is_gated in (True, False):
        sums = (torch.randn(T, H), residual, gain, EPS)
        yield "add_norm_linear", (*sums, after, None, is_gated, after_rows)
    down, down_rows = torch.randn(H, N).to(FP8), torch.rand(H, 1)
    mlp = (residual, x, first, None, gain, EPS, after, None, down, None, gain, EPS)
    scales = (rows, after_rows, down_rows)
    yield "feed_forward", (*mlp, None, None, False, *scales, None)
    yield "feed_forward", (*mlp, after, None, True, *scales, after_rows)
    yield "linear_residual", (residual, x, first, None, rows)
    yield "linear_residual_norm", (residual, x, first, None, gain, EPS, rows)
    yield (
        "linear_residual_norm_linear",
        (residual, x, first, None, gain, EPS, after, None, True, rows, after_rows),
    )


SAMPLES = list(samples())
EACH = pytest.mark.parametrize(("name", "args"), SAMPLES, ids=[name for name, _ in SAMPLES])


@EACH
def test_operators_write_what_they_declare_and_fake_their_shapes(name, args):
    operator = getattr(torch.ops.octavo, name).default
    torch.library.opcheck(
        operator, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    mutated = {arg.name for arg in operator._schema.arguments if arg.is_write}
    assert mutated == ({"residual"} if "residual" in name or name == "add_rms_norm" else set())


# Torch's check of schemas multiplies each argument, which FP8 tensors cannot be.
@pytest.mark.parametrize(("name", "args"), list(samples_of_8_bits()))
def test_operators_with_weights_of_8_bits_fake_their_shapes(name, args):
    operator = getattr(torch.ops.octavo, name).default
    torch.library.opcheck(
        operator, args, test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
    )


@EACH
def test_shapes_follow_an_unbounded_number_of_tokens(name, args):
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True):
        num_tokens = shapes.create_unbacked_symint()

        def of_any_length(arg):
            if not isinstance(arg, torch.Tensor) or arg.shape[0] != T:
                return arg
            return torch.empty_strided((num_tokens, *arg.shape[1:]), arg.stride())

        output = getattr(torch.ops.octavo, name)(*map(of_any_length, args))
    expected = getattr(torch.ops.octavo, name)(*args)
    if expected is None:
        assert output is None
        return
    assert output.shape == (num_tokens, *expected.shape[1:])
    assert output.stride() == expected.stride()
    assert output.dtype == expected.dtype
    assert expected.is_contiguous()
