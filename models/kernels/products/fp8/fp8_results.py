"""How products of FP8 factors end: scales by row, bias, gate, and the rounding of the result.

Sums are [tokens, outputs] where TOKEN_AXIS is 0, [outputs, tokens] where it is 1: the tensor cores'
left factor has 64 rows or more, of tokens if these are many, else of the weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from models.kernels.products.gate import gated, rounded_to
from models.number_formats import BLOCK, FP8_MAX, SMALLEST_AMAX
from models.operands.token_scales import TOKEN_ALIGNMENT

_BLOCK = gl.constexpr(BLOCK)
_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)
_TOKEN_ALIGNMENT = gl.constexpr(TOKEN_ALIGNMENT)


@gluon.jit
def along(first, sums, AXIS: gl.constexpr):
    """Returns the numbers of tokens or outputs of an axis of sums, from `first` on."""
    return first + gl.arange(0, sums.shape[AXIS], gl.SliceLayout(1 - AXIS, sums.type.layout))


@gluon.jit
def _store(
    values, output_ptr, first_token, first_output, num_tokens,
    TOKEN_AXIS: gl.constexpr, NUM_OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Stores [tokens, outputs] or [outputs, tokens] to an output [T, N]."""
    if TOKEN_AXIS == 0:
        THREADS: gl.constexpr = min(32, values.shape[1] // 8)
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [4, 1], [1, 0])
        values = gl.convert_layout(values, rows)
        tokens = along(first_token, values, 0)
        outputs = along(first_output, values, 1)
        is_stored = (tokens < num_tokens)[:, None] & (outputs < NUM_OUTPUTS)[None, :]
        at = tokens.to(gl.int64)[:, None] * NUM_OUTPUTS + outputs[None, :]
        gl.store(output_ptr + at, values, mask=is_stored)
    else:
        columns: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
        values = gl.convert_layout(values, columns)
        outputs = along(first_output, values, 0)
        tokens = along(first_token, values, 1)
        is_stored = (outputs < NUM_OUTPUTS)[:, None] & (tokens < num_tokens)[None, :]
        output_ptr += tokens[None, :] * NUM_OUTPUTS
        gl.store(output_ptr + outputs[:, None], values, mask=is_stored)


@gluon.jit
def store_sums(
    sums, operands, token, output, num_tokens, TOKEN_AXIS: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Scales sums by row, if blocks were not scaled before, and adds the bias; then stores them."""
    x_scale_ptr, weight_scale_ptr, bias_ptr, output_ptr, _ = operands
    outputs = along(output, sums, 1 - TOKEN_AXIS)
    is_output = outputs < NUM_OUTPUTS
    if not BLOCKED:
        tokens = along(token, sums, TOKEN_AXIS)
        token_scale = gl.load(x_scale_ptr + tokens, mask=tokens < num_tokens, other=0.0)
        row_scale = gl.load(weight_scale_ptr + outputs, mask=is_output, other=0.0)
        sums *= gl.expand_dims(token_scale, 1 - TOKEN_AXIS)
        sums *= gl.expand_dims(row_scale, TOKEN_AXIS)
    if bias_ptr is not None:
        # Only one part of the sum includes the bias.
        is_added = is_output & (gl.program_id(1) == 0)
        bias = gl.load(bias_ptr + outputs, mask=is_added, other=0.0).to(gl.float32)
        sums += gl.expand_dims(bias, TOKEN_AXIS)
    if SPLITS > 1:
        part = gl.program_id(1)
        if TOKEN_AXIS == 0:
            part = part.to(gl.int64)  # of many tokens
        output_ptr += part * num_tokens * NUM_OUTPUTS
    values = sums.to(output_ptr.dtype.element_ty)
    _store(values, output_ptr, token, output, num_tokens, TOKEN_AXIS, NUM_OUTPUTS)


@gluon.jit
def _common_amax(amax, amaxes, known, GROUP: gl.constexpr):
    """Returns the largest magnitude of each token's outputs, of all groups."""
    GROUPS: gl.constexpr = amaxes.shape[0]
    amaxes.index(GROUP).store(amax)
    mbarrier.arrive(known)
    mbarrier.wait(known, 0)
    for group in gl.static_range(GROUPS):
        amax = gl.maximum(amax, amaxes.index(group).load(amax.type.layout))
    return amax


@gluon.jit
def store_gated(
    gate, up, operands, token, output, num_tokens, TOKEN_AXIS: gl.constexpr, GROUP: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, BLOCKED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Stores silu(gate) * up, with the roundings to DTYPE of a launch of its own, then to FP8.

    FP8 numbers would enlarge the difference that a rounding less makes. GROUP: of warps that have
    the same tokens; they share a token's scale through shared memory.
    """
    x_scale_ptr, weight_scale_ptr, _, output_ptr, rounding = operands
    tokens = along(token, gate, TOKEN_AXIS)
    is_token = tokens < num_tokens
    if not BLOCKED:
        outputs = along(output, gate, 1 - TOKEN_AXIS)
        is_output = outputs < NUM_OUTPUTS
        token_scale = gl.load(x_scale_ptr + tokens, mask=is_token, other=0.0)
        token_scale = gl.expand_dims(token_scale, 1 - TOKEN_AXIS)
        row_scales = weight_scale_ptr + outputs
        gate_scale = gl.load(row_scales, mask=is_output, other=0.0)
        gate *= token_scale * gl.expand_dims(gate_scale, TOKEN_AXIS)
        up_scale = gl.load(row_scales + NUM_OUTPUTS, mask=is_output, other=0.0)
        up *= token_scale * gl.expand_dims(up_scale, TOKEN_AXIS)
    values = gated(gate, up, DTYPE, True)
    if rounding[0] is None:
        values = values.to(DTYPE)
    else:
        exact = rounded_to(values, DTYPE)
        amax = gl.max(gl.abs(exact), axis=1 - TOKEN_AXIS)
        if TOKEN_AXIS == 1:
            amax = _common_amax(amax, rounding[1], rounding[2], GROUP)
        scale = gl.maximum(amax, _SMALLEST_AMAX) / _FP8_MAX
        scaled = exact / gl.expand_dims(scale, 1 - TOKEN_AXIS)
        scaled = gl.minimum(gl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
        values = scaled.to(output_ptr.dtype.element_ty)
        stride = (num_tokens + _TOKEN_ALIGNMENT - 1) // _TOKEN_ALIGNMENT * _TOKEN_ALIGNMENT
        at_scales = rounding[0] + output // _BLOCK * stride + tokens
        gl.store(at_scales, scale, mask=is_token & (GROUP == 0))
    _store(values, output_ptr, token, output, num_tokens, TOKEN_AXIS, NUM_OUTPUTS)
