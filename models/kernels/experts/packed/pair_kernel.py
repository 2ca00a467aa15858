"""Experts of 4 bits with few tokens: each pair of a token and an expert is a matrix times a vector.

Such a product takes as long as reading its weights, so that weights pass through registers alone,
and a program reads all of its own before its first product. The warps of a program share the
inputs. Tensor cores multiply, as unpacked weights of 16 bits are pairs in a register already; all
eight columns of their products have the same input.

A lane reads a whole run of 32 weights, whose words are in the order in which lanes take turns on
tensor cores. So a product takes words of the same number from four runs, and the inputs that belong
to them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from models.kernels.experts.packed.expert_kernel import OCTET, gated
from models.kernels.experts.packed.word_scales import are_floats, words_of_row
from models.kernels.launching.dependent_launch import let_next_start, wait_for_previous
from models.kernels.launching.gluon_names import barrier
from models.kernels.products.packed.matrix_weights import (
    finished,
    floats_of,
    halves_of,
    integers_of,
    pair_of_bfloat16,
)

_TILE = gl.constexpr(128)
"""Inputs of a warp's tile: four runs of 32, one for each lane of a row."""
_COLUMNS = gl.constexpr(8)
"""Of a product on tensor cores."""


@constexpr_function
def word_layout(rows, num_warps):
    """Returns the layout of [warps, rows, runs, words of a run]."""
    row_bits = [[0, 1 << bit, 0, 0] for bit in range(rows.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *row_bits[3:]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], *row_bits[:3]],
        warp_bases=[[1 << bit, 0, 0, 0] for bit in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[num_warps, rows, 4, 4],
    )


@constexpr_function
def input_layout(num_warps):
    """Returns the layout of [warps, columns of the product, runs, inputs of a run]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1 << bit] for bit in range(5)],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], *([0, 1 << bit, 0, 0] for bit in range(3))],
        warp_bases=[[1 << bit, 0, 0, 0] for bit in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[num_warps, 8, 4, 32],
    )


@gluon.jit
def _fetch(
    weight_ptr, scale_ptr, rows, scale_rows, step: gl.constexpr, NUM_ROWS: gl.constexpr,
    NUM_INPUTS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Loads words [warps, rows, runs, 4] and scales [warps, rows, runs] of a step.

    rows: [rows] int64, of the stacked matrices.
    scale_rows: [rows], of a matrix, gate and up in turns, to which scale_ptr points; see
        models.operands.run_scales. It has NUM_ROWS rows.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = word_layout(rows.shape[0], NUM_WARPS)
    of_scales: gl.constexpr = gl.SliceLayout(3, layout)
    warps = gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_scales)))
    runs = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_scales)))
    tile = step * NUM_WARPS + warps
    run = (tile * 4)[:, None, None] + runs[None, None, :]
    if (step + 1) * NUM_WARPS * _TILE > NUM_INPUTS:
        # Past the end inputs are zero, and a weight that exists needs no mask.
        run = gl.minimum(run, NUM_INPUTS // 32 - 1)
        tile = gl.minimum(tile, (NUM_INPUTS - 1) // _TILE)
    at = rows[None, :, None] * (NUM_INPUTS // 32) + run
    words = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    at_word = at[:, :, :, None] * 4 + words[None, None, None, :]
    at_scale = (tile * NUM_ROWS)[:, None, None] + scale_rows[None, :, None]
    at_scale = at_scale * EACH + (runs // (4 // EACH))[None, None, :]
    return gl.load(weight_ptr + at_word), gl.load(scale_ptr + at_scale)


@gluon.jit
def _inputs(x_ptr, step: gl.constexpr, on_cores: gl.constexpr, NUM_INPUTS: gl.constexpr):
    """Returns a step's inputs as the right factor, [warps, inputs, columns of the product]."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = input_layout(NUM_WARPS)
    of_runs: gl.constexpr = gl.SliceLayout(3, layout)
    warps = gl.arange(0, NUM_WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_runs)))
    columns = gl.arange(0, _COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, of_runs)))
    runs = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_runs)))
    run = ((step * NUM_WARPS + warps) * 4)[:, None, None] + runs[None, None, :]
    # All columns have the same inputs.
    run += columns[None, :, None] * 0
    each = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    at = (run * 32)[:, :, :, None] + each[None, None, None, :]
    if (step + 1) * NUM_WARPS * _TILE > NUM_INPUTS:
        x = gl.load(x_ptr + at, mask=(run < NUM_INPUTS // 32)[:, :, :, None], other=0.0)
    else:
        x = gl.load(x_ptr + at)
    # From columns, runs, and the 16ths, eights, words (two dimensions) and pairs of a run.
    x = x.reshape([NUM_WARPS, _COLUMNS, 4, 2, 2, 2, 2, 2]).permute((0, 5, 3, 4, 6, 2, 7, 1))
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=on_cores, k_width=2)
    return gl.convert_layout(x.reshape([NUM_WARPS, _TILE, _COLUMNS]), right, assert_trivial=True)


@gluon.jit
def _weights(words, scales, on_cores: gl.constexpr, GROUP: gl.constexpr):
    """Returns a step's weights as the left factor, [warps, rows, inputs]."""
    NUM_WARPS: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    if GROUP is None:
        scales = pair_of_bfloat16(scales)[:, :, :, None].broadcast_to(words.shape)
        eights = floats_of(words, scales, scales)
    else:
        first, second = halves_of(scales, are_floats(GROUP))
        first = first[:, :, :, None].broadcast_to(words.shape)
        second = second[:, :, :, None].broadcast_to(words.shape)
        if are_floats(GROUP):
            eights = floats_of(words, first, second)
        else:
            eights = integers_of(words, first, first, second)
    # From runs, words (two dimensions), their pairs' elements, eights and 16ths of a run.
    eights = eights.reshape([NUM_WARPS, ROWS, 4, 2, 2, 2, 2, 2])
    values = eights.permute((0, 1, 3, 7, 6, 4, 2, 5)).reshape([NUM_WARPS, ROWS, _TILE])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=on_cores, k_width=2)
    return gl.convert_layout(values, left, assert_trivial=True)


@gluon.jit
def pair_kernel(
    weight_ptr, x_ptr, scale_ptr, bias_ptr, ids_ptr, output_ptr, alpha, limit,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, GROUP: gl.constexpr,
    NUM_EXPERTS: gl.constexpr, TOP_K: gl.constexpr, IS_GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    IS_CLAMPED: gl.constexpr, ROWS: gl.constexpr, EACH: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Computes ROWS // 2 gated inner features of a pair, or ROWS of its results, not yet weighted.

    The experts are older than the previous kernel unless IS_GATED.
    scale_ptr: bytes of MXFP4, or words, which word_scales describes with GROUP; EACH are those of
        128 columns of a row.
    """
    NUM_WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    STEPS: gl.constexpr = (NUM_INPUTS + NUM_WARPS * _TILE - 1) // (NUM_WARPS * _TILE)
    on_cores: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[NUM_WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    pair = gl.program_id(0)
    if IS_GATED:
        wait_for_previous(DEPENDENT)
    # Only now, so that the next kernel may read the experts before its own wait.
    let_next_start(DEPENDENT)
    expert = gl.load(ids_ptr + pair)
    if expert >= NUM_EXPERTS:
        return
    row_of: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(2, gl.SliceLayout(3, word_layout(ROWS, NUM_WARPS)))
    )
    NUM_ROWS: gl.constexpr = HALVES * NUM_OUTPUTS
    NUM_WORDS: gl.constexpr = words_of_row(NUM_INPUTS)
    rows = gl.arange(0, ROWS, row_of)
    scale_rows = gl.minimum(gl.program_id(1) * ROWS + rows, NUM_ROWS - 1)
    scale_ptr += expert.to(gl.int64) * (NUM_WORDS * NUM_ROWS * EACH)
    outputs = gl.program_id(1) * (ROWS // HALVES) + rows // (OCTET * HALVES) * OCTET
    outputs += rows % OCTET
    # Rows past the end read the last one again, which needs no mask.
    outputs = gl.minimum(outputs, NUM_OUTPUTS - 1)
    rows = rows // OCTET % HALVES * NUM_OUTPUTS + outputs
    rows = expert.to(gl.int64) * NUM_ROWS + rows
    loaded = ()
    for step in gl.static_range(STEPS):
        step_loaded = _fetch(
            weight_ptr, scale_ptr, rows, scale_rows, step, NUM_ROWS, NUM_INPUTS, EACH
        )
        # Triton knows tuples of any length, but unpacks none.
        loaded = loaded + (step_loaded,)  # type: ignore[assignment]  # noqa: RUF005
    # The compiler would delay reads to save registers; it moves none across these two.
    if IS_GATED:
        barrier()
    else:
        wait_for_previous(DEPENDENT)
    x_ptr += (pair // TOP_K if IS_GATED else pair).to(gl.int64) * NUM_INPUTS
    sums = gl.zeros([NUM_WARPS, ROWS, _COLUMNS], gl.float32, on_cores)
    for step in gl.static_range(STEPS):
        words, scales = loaded[step]  # type: ignore[var-annotated]  # as above
        x = _inputs(x_ptr, step, on_cores, NUM_INPUTS)
        sums = mma_v2(_weights(words, scales, on_cores, GROUP), x, sums)
    # All eight columns have the same sums.
    results = gl.sum(gl.sum(sums, 2), 0) * 0.125
    if are_floats(GROUP):
        results = finished(results, scale_ptr)
    results = gl.convert_layout(results, row_of)
    if HAS_BIAS:
        results += gl.load(bias_ptr + rows).to(gl.float32)
    if IS_GATED:
        # Gate and up of eight features take turns.
        both = results.reshape([ROWS // 16, 2, OCTET]).permute((0, 2, 1))
        gate, up = gl.split(both)
        results = gated(gate, up, alpha, limit, IS_CLAMPED).reshape([ROWS // 2])
    columns = gl.program_id(1) * (ROWS // HALVES)
    columns += gl.arange(0, ROWS // HALVES, results.type.layout)
    at = pair.to(gl.int64) * NUM_OUTPUTS + columns
    results = results.to(output_ptr.dtype.element_ty)
    gl.store(output_ptr + at, results, mask=columns < NUM_OUTPUTS)
