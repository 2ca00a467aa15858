"""How products of few tokens in FP8 end: as in wide_fp8_results, of sums [outputs, tokens]."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from models.number_formats import BLOCK, FP8_MAX, SMALLEST_AMAX
from models.ops.operands.token_scales import TOKEN_ALIGNMENT

_BLOCK = gl.constexpr(BLOCK)
_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)
_TOKEN_ALIGNMENT = gl.constexpr(TOKEN_ALIGNMENT)


@gluon.jit
def _store(values, output_ptr, first_output, num_tokens, NUM_OUTPUTS: gl.constexpr):
    """Stores [outputs, tokens] to an output [T, N]."""
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    values = gl.convert_layout(values, layout)
    outputs = first_output + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    tokens = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    is_stored = (outputs < NUM_OUTPUTS)[:, None] & (tokens < num_tokens)[None, :]
    gl.store(output_ptr + tokens[None, :] * NUM_OUTPUTS + outputs[:, None], values, mask=is_stored)


@gluon.jit
def store_sums(
    sums, operands, output, num_tokens,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scales sums by row, if blocks were not scaled before, and adds the bias; then stores them."""
    x_scale_ptr, weight_scale_ptr, bias_ptr, output_ptr, _ = operands
    layout: gl.constexpr = sums.type.layout
    outputs = output + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    is_output = outputs < NUM_OUTPUTS
    if not BLOCKED:
        tokens = gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
        token_scale = gl.load(x_scale_ptr + tokens, mask=tokens < num_tokens, other=0.0)
        row_scale = gl.load(weight_scale_ptr + outputs, mask=is_output, other=0.0)
        sums = sums * token_scale[None, :] * row_scale[:, None]
    if bias_ptr is not None:
        # Only one part of the sum includes the bias.
        is_added = is_output & (gl.program_id(1) == 0)
        sums += gl.load(bias_ptr + outputs, mask=is_added, other=0.0).to(gl.float32)[:, None]
    if SPLITS > 1:
        output_ptr += gl.program_id(1) * num_tokens * NUM_OUTPUTS
    _store(sums.to(output_ptr.dtype.element_ty), output_ptr, output, num_tokens, NUM_OUTPUTS)


@gluon.jit
def _common_amax(exact, amaxes, known, GROUP: gl.constexpr):
    """Returns the largest magnitude of each token's outputs, of all groups."""
    GROUPS: gl.constexpr = amaxes.shape[0]
    amax = gl.max(gl.abs(exact), axis=0)
    amaxes.index(GROUP).store(amax)
    mbarrier.arrive(known)
    mbarrier.wait(known, 0)
    for group in gl.static_range(GROUPS):
        amax = gl.maximum(amax, amaxes.index(group).load(amax.type.layout))
    return amax


@gluon.jit
def store_gated(
    gate, up, operands, output, num_tokens, GROUP: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Stores silu(gate) * up, with the roundings to DTYPE of a launch of its own, then to FP8."""
    x_scale_ptr, weight_scale_ptr, _, output_ptr, rounding = operands
    layout: gl.constexpr = gate.type.layout
    tokens = gl.arange(0, gate.shape[1], gl.SliceLayout(0, layout))
    is_token = tokens < num_tokens
    if not BLOCKED:
        outputs = output + gl.arange(0, gate.shape[0], gl.SliceLayout(1, layout))
        is_output = outputs < NUM_OUTPUTS
        token_scale = gl.load(x_scale_ptr + tokens, mask=is_token, other=0.0)[None, :]
        row_scales = weight_scale_ptr + outputs
        gate *= token_scale * gl.load(row_scales, mask=is_output, other=0.0)[:, None]
        up *= token_scale * gl.load(row_scales + NUM_OUTPUTS, mask=is_output, other=0.0)[:, None]
    gate = gate.to(DTYPE).to(gl.float32)
    up = up.to(DTYPE).to(gl.float32)
    values = (gate * (1.0 / (1.0 + gl.exp(-gate))) * up).to(DTYPE)
    if rounding[0] is not None:
        output_scale_ptr, amaxes, known = rounding
        exact = values.to(gl.float32)
        amax = _common_amax(exact, amaxes, known, GROUP)
        scale = gl.maximum(amax, _SMALLEST_AMAX) / _FP8_MAX
        scaled = gl.minimum(gl.maximum(exact / scale[None, :], -_FP8_MAX), _FP8_MAX)
        values = scaled.to(output_ptr.dtype.element_ty)
        stride = (num_tokens + _TOKEN_ALIGNMENT - 1) // _TOKEN_ALIGNMENT * _TOKEN_ALIGNMENT
        at_scale = output_scale_ptr + output // _BLOCK * stride + tokens
        gl.store(at_scale, scale, mask=is_token & (GROUP == 0))
    _store(values, output_ptr, output, num_tokens, NUM_OUTPUTS)
