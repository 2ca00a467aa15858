"""How products of FP8 experts end: scales by row, bias, rounding and where results go.

Sums are [tokens, outputs] where TOKEN_AXIS is 0, [outputs, tokens] where it is 1. Rows are the
first row of a tile's tokens and the end of the expert's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from models.kernels.products.fp8.fp8_results import along
from models.number_formats import FP8_MAX, SMALLEST_AMAX

_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)


@gluon.jit
def finished(
    sums, matrix_row, output, table, bias_ptr, GROUP: gl.constexpr, NUM_OUTPUTS: gl.constexpr,
    TOKEN_AXIS: gl.constexpr, BY_ROW: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scales sums by row if blocks were not, and adds the bias.

    matrix_row: the first one, among those of all experts; output: the same of the half. table:
    scales of the tile's rows, for both groups.
    """
    if BY_ROW:
        ROWS: gl.constexpr = sums.shape[1 - TOKEN_AXIS]
        scales = table.slice(GROUP * ROWS * TOKEN_AXIS, ROWS)
        scale = scales.load(gl.SliceLayout(TOKEN_AXIS, sums.type.layout))
        sums *= gl.expand_dims(scale, TOKEN_AXIS)
    if HAS_BIAS:
        rows = along(matrix_row, sums, 1 - TOKEN_AXIS)
        is_output = along(output, sums, 1 - TOKEN_AXIS) < NUM_OUTPUTS
        bias = gl.load(bias_ptr + rows, mask=is_output, other=0.0)
        sums += gl.expand_dims(bias.to(gl.float32), TOKEN_AXIS)
    return sums


@gluon.jit
def _common_amax(amax, exchange, turn, GROUP: gl.constexpr):
    """Returns the largest magnitude of each token's outputs, of both groups.

    The groups take turns in memory with each tile, as one may be a tile ahead of the other.
    """
    amaxes, known = exchange
    amaxes.index(2 * turn + GROUP).store(amax)
    mbarrier.arrive(known)
    mbarrier.wait(known, turn)
    return gl.maximum(amax, amaxes.index(2 * turn + 1 - GROUP).load(amax.type.layout))


@gluon.jit
def store_rounded(
    values, rows, output, output_ptr, scale_ptr, exchange, turn, GROUP: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, TOKEN_AXIS: gl.constexpr,
):  # fmt: skip
    """Stores a tile in FP8, and a scale for the outputs of each token, at scale_ptr."""
    first_row, end = rows
    amax = gl.max(gl.abs(values), axis=1 - TOKEN_AXIS)
    if TOKEN_AXIS == 1:
        amax = _common_amax(amax, exchange, turn, GROUP)
    scale = gl.maximum(amax, _SMALLEST_AMAX) / _FP8_MAX
    scaled = values * gl.expand_dims(1.0 / scale, 1 - TOKEN_AXIS)
    scaled = gl.minimum(gl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
    tokens = along(0, values, TOKEN_AXIS)
    is_stored = first_row + tokens < end
    if TOKEN_AXIS == 1:
        is_stored = is_stored & (GROUP == 0)
    gl.store(scale_ptr + tokens, scale, mask=is_stored)
    rounded = scaled.to(output_ptr.dtype.element_ty)
    store(rounded, rows, output, output_ptr, None, NUM_OUTPUTS, NUM_OUTPUTS, TOKEN_AXIS)


@gluon.jit
def store(
    values, rows, output, output_ptr, tile_pairs, NUM_OUTPUTS: gl.constexpr, WIDTH: gl.constexpr,
    TOKEN_AXIS: gl.constexpr,
):  # fmt: skip
    """Stores a tile to rows of an output [., WIDTH].

    tile_pairs: in shared memory, the row of each token; None for rows in order.
    """
    first_row, end = rows
    EACH: gl.constexpr = 64 // values.dtype.primitive_bitwidth * (2 - TOKEN_AXIS)
    LANES: gl.constexpr = values.shape[1 - TOKEN_AXIS] // EACH
    if TOKEN_AXIS == 0:
        across: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [4, 1], [1, 0])
        values = gl.convert_layout(values, across)
    else:
        down: gl.constexpr = gl.BlockedLayout([EACH, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
        values = gl.convert_layout(values, down)
    outputs = along(output, values, 1 - TOKEN_AXIS)
    numbers = along(first_row, values, TOKEN_AXIS)
    is_row = numbers < end
    if tile_pairs is not None:
        numbers = tile_pairs.load(gl.SliceLayout(1 - TOKEN_AXIS, values.type.layout))
    at = gl.expand_dims(numbers.to(gl.int64) * WIDTH, 1 - TOKEN_AXIS)
    at += gl.expand_dims(outputs, TOKEN_AXIS)
    is_stored = gl.expand_dims(is_row, 1 - TOKEN_AXIS)
    is_stored = is_stored & gl.expand_dims(outputs < NUM_OUTPUTS, TOKEN_AXIS)
    gl.store(output_ptr + at, values, mask=is_stored)
