"""How products of FP8 factors end: scales by row, bias, gate, and the rounding of the result."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from models.number_formats import BLOCK, FP8_MAX, SMALLEST_AMAX
from models.ops.operands.token_scales import TOKEN_ALIGNMENT

_BLOCK = gl.constexpr(BLOCK)
_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)
_TOKEN_ALIGNMENT = gl.constexpr(TOKEN_ALIGNMENT)


@gluon.jit
def _store(values, output_ptr, first_token, first_output, num_tokens, NUM_OUTPUTS: gl.constexpr):
    """Stores [tokens, outputs] to an output [T, N]."""
    WIDTH: gl.constexpr = values.shape[1]
    THREADS: gl.constexpr = min(32, WIDTH // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
    values = gl.convert_layout(values, layout)
    tokens = first_token + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    outputs = first_output + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    is_stored = (tokens < num_tokens)[:, None] & (outputs < NUM_OUTPUTS)[None, :]
    at = tokens.to(gl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
    gl.store(output_ptr + at, values, mask=is_stored)


@gluon.jit
def store_sums(
    sums, operands, token, output, num_tokens,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scales sums by row, if blocks were not scaled before, and adds the bias; then stores them."""
    x_scale_ptr, weight_scale_ptr, bias_ptr, output_ptr, _ = operands
    layout: gl.constexpr = sums.type.layout
    outputs = output + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    is_output = outputs < NUM_OUTPUTS
    if not BLOCKED:
        tokens = token + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
        token_scale = gl.load(x_scale_ptr + tokens, mask=tokens < num_tokens, other=0.0)
        row_scale = gl.load(weight_scale_ptr + outputs, mask=is_output, other=0.0)
        sums = sums * token_scale[:, None] * row_scale[None, :]
    if bias_ptr is not None:
        # Only one part of the sum includes the bias.
        is_added = is_output & (gl.program_id(1) == 0)
        sums += gl.load(bias_ptr + outputs, mask=is_added, other=0.0).to(gl.float32)[None, :]
    if SPLITS > 1:
        output_ptr += gl.program_id(1).to(gl.int64) * num_tokens * NUM_OUTPUTS
    values = sums.to(output_ptr.dtype.element_ty)
    _store(values, output_ptr, token, output, num_tokens, NUM_OUTPUTS)


@gluon.jit
def store_gated(
    gate, up, operands, token, output, num_tokens,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Stores silu(gate) * up, with the roundings to DTYPE of a launch of its own, then to FP8.

    FP8 numbers would enlarge the difference that a rounding less makes.
    """
    x_scale_ptr, weight_scale_ptr, _, output_ptr, output_scale_ptr = operands
    layout: gl.constexpr = gate.type.layout
    tokens = token + gl.arange(0, gate.shape[0], gl.SliceLayout(1, layout))
    is_token = tokens < num_tokens
    if not BLOCKED:
        outputs = output + gl.arange(0, gate.shape[1], gl.SliceLayout(0, layout))
        is_output = outputs < NUM_OUTPUTS
        token_scale = gl.load(x_scale_ptr + tokens, mask=is_token, other=0.0)[:, None]
        row_scales = weight_scale_ptr + outputs
        gate *= token_scale * gl.load(row_scales, mask=is_output, other=0.0)[None, :]
        up *= token_scale * gl.load(row_scales + NUM_OUTPUTS, mask=is_output, other=0.0)[None, :]
    gate = gate.to(DTYPE).to(gl.float32)
    up = up.to(DTYPE).to(gl.float32)
    values = (gate * (1.0 / (1.0 + gl.exp(-gate))) * up).to(DTYPE)
    if output_scale_ptr is not None:
        exact = values.to(gl.float32)
        amax = gl.max(gl.abs(exact), axis=1)
        scale = gl.maximum(amax, _SMALLEST_AMAX) / _FP8_MAX
        scaled = gl.minimum(gl.maximum(exact / scale[:, None], -_FP8_MAX), _FP8_MAX)
        values = scaled.to(output_ptr.dtype.element_ty)
        stride = (num_tokens + _TOKEN_ALIGNMENT - 1) // _TOKEN_ALIGNMENT * _TOKEN_ALIGNMENT
        gl.store(output_scale_ptr + output // _BLOCK * stride + tokens, scale, mask=is_token)
    _store(values, output_ptr, token, output, num_tokens, NUM_OUTPUTS)
