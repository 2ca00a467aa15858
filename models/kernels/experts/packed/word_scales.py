"""Scales of experts in 4 bits for Hopper's tensor cores, from words of four bytes.

models.operands.run_scales has their order in memory, and
models.kernels.products.packed.matrix_weights takes them. GROUP is how many columns share a scale:
32, 64 or 128 of integers, whose words are theirs alone, and 16 of NVFP4, whose words have the
scales of 32 columns. It is None for MXFP4, whose words have those of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from models.kernels.products.packed.matrix_weights import group_layout, halves_of
from models.operands.run_scales import COLUMNS as WORD_COLUMNS
from models.operands.run_scales import RUNS, num_words

_RUNS = gl.constexpr(RUNS)
"""Bytes of a word."""

words_of_row = constexpr_function(num_words)
"""Does what num_words does, in kernels."""


def _pairs(num_runs: int) -> str:
    """Returns instructions that do what pair_of_bfloat16 does, for the first bytes of a word.

    They get the word once for each byte.
    """
    return " ".join(
        f"prmt.b32 ${at}, ${num_runs}, 0, 0x4{at}4{at};mad.lo.u32 ${at}, ${at}, 0x80, 0x20002000;"
        for at in range(num_runs)
    )


_FOUR_PAIRS = gl.constexpr(_pairs(4))
_TWO_PAIRS = gl.constexpr(_pairs(2))


@constexpr_function
def are_floats(group):
    """Returns whether weights are floats of 4 bits, not integers."""
    return group in (None, 16)


@constexpr_function
def columns_of_word(group):
    """Returns how many columns of a row have their scales in one word."""
    return WORD_COLUMNS if group is None else max(32, group)


@constexpr_function
def words_of_columns(num_columns, group):
    """Returns how many words have the scales of some columns, at least one."""
    return max(1, num_columns // columns_of_word(group))


@constexpr_function
def word_layout(num_rows, num_words, num_warps=4, num_runs=4):
    """Returns the layout of words [rows, words], of which num_runs bytes count."""
    rows = [[1 << bit, 0, 0] for bit in range(num_rows.bit_length() - 1)]
    words = [[0, 1 << bit, 0] for bit in range(num_words.bit_length() - 1)]
    runs = [[0, 0, 1 << bit] for bit in range(num_runs.bit_length() - 1)]
    last_warp = 3 + num_warps.bit_length()
    of_runs = gl.DistributedLinearLayout(
        reg_bases=[*runs, *words, rows[3], *rows[last_warp:]],
        lane_bases=[[0, 0, 0], [0, 0, 0], *rows[:3]],
        warp_bases=rows[4:last_warp],
        block_bases=[],
        shape=[num_rows, num_words, num_runs],
    )
    return gl.SliceLayout(2, of_runs)


@constexpr_function
def tile_layout(num_rows, num_columns, num_warps, group):
    """Returns the layout of a tile's words, [rows, words], that scales_of takes."""
    num_runs = min(RUNS, num_columns // 32) if group is None else 1
    return word_layout(num_rows, words_of_columns(num_columns, group), num_warps, num_runs)


@gluon.jit
def scales_of(words, step, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """Returns the scales of a step's columns as matrix_weights.unpacked takes them.

    words: [rows, words] in tile_layout, of which a step of MXFP4 has bytes.
    """
    if GROUP is None:
        pairs = _scales_of_runs(words, step, COLUMNS)
        return pairs, pairs
    else:  # noqa: RET505  # one branch is compiled
        # Of NVFP4 the scales of the first and second 16 columns, of integers scales and zeros.
        first, second = halves_of(words, are_floats(GROUP))
        full: gl.constexpr = group_layout(words.shape[0], words.shape[1], 1, gl.num_warps())
        layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, full))
        first = gl.convert_layout(first, layout, assert_trivial=True)
        second = gl.convert_layout(second, layout, assert_trivial=True)
        if are_floats(GROUP):
            return first, second
        else:  # noqa: RET505  # as above
            return first, first, second


@gluon.jit
def _scales_of_runs(words, step, COLUMNS: gl.constexpr):
    """Returns the scales of a step's runs of MXFP4, [rows, COLUMNS / 32], as pairs of bfloat16."""
    ROWS: gl.constexpr = words.shape[0]
    RUNS: gl.constexpr = min(_RUNS, COLUMNS // 32)
    if RUNS < _RUNS:
        words = words >> step % 2 * 16
    each = words[:, :, None].broadcast_to([ROWS, words.shape[1], RUNS])
    if RUNS == _RUNS:
        scales = gl.inline_asm_elementwise(
            _FOUR_PAIRS, "=&r,=&r,=&r,=&r,r,r,r,r", [each], dtype=gl.int32, is_pure=True, pack=4
        )
    else:
        scales = gl.inline_asm_elementwise(
            _TWO_PAIRS, "=&r,=&r,r,r", [each], dtype=gl.int32, is_pure=True, pack=2
        )
    full: gl.constexpr = group_layout(ROWS, COLUMNS // 32, 1, gl.num_warps())
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, full))
    return gl.convert_layout(scales.reshape([ROWS, COLUMNS // 32]), layout, assert_trivial=True)
