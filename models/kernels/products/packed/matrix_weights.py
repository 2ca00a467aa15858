"""Weights of 4 and 8 bits on their way from shared memory to Hopper's tensor cores.

A tensor core's left factor may come from registers: thread t of 32 holds elements 2 q, 2 q + 1,
2 q + 8 and 2 q + 9 of every 16 of rows t / 4 and t / 4 + 8, where q is t mod 4. Tiles are
[rows, columns] of the weight; q and words are those of models.operands.packed_weights. A word
has eight columns of a run of 32, or four columns of 8 bits of a run of 16.
"""

from collections.abc import Callable

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from models.kernels.launching.gluon_names import reinterpret


@gluon.jit
def _halves_of(words):
    """Returns the two bfloat16 of each word, [..., 2]."""
    first = words.to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(first, (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))


def _unpack(convert: Callable[[int], str]) -> str:
    """Returns instructions that make four pairs of bfloat16 of a word; see _by_words."""
    pairs = (convert(pair) + f"mul.bf16x2 ${pair}, part, ${5 + pair // 2};" for pair in range(4))
    return f"{{ .reg .b32 part; {' '.join(pairs)} }}"


def _integers(pair: int) -> str:
    """An integer is the last bits of a significand between 128 and 256; 128 + zero is taken off."""
    return f"""
        shr.b32 part, $4, {4 * pair};
        lop3.b32 part, part, 0x000f000f, 0x43004300, 0xea;
        sub.bf16x2 part, part, $7;
    """


def _floats(pair: int) -> str:
    """The bits of e2m1 move to those of bfloat16, which makes a number 2^126 too small.

    Signs begin at bits 15, 12, 14 and 13 of a half, magnitudes at 6, 3, 0 and 9. A factor moves
    both ways at once: no bits of its products overlap.
    """
    moved = (
        "mov.b32 part, $4;",
        "shl.b32 part, $4, 3;",
        "and.b32 part, $4, 0x40074007; mul.lo.u32 part, part, 66;",
        "shr.u32 part, $4, 3; and.b32 part, part, 0x05c005c0; mul.lo.u32 part, part, 33;",
    )
    return f"{moved[pair]} and.b32 part, part, 0x81c081c0;"


def _pair_of_bytes(pair: str, word: str) -> str:
    """The first bytes of a word's halves become bfloat16.

    Seven bits are the last ones of a significand between 128 and 256. Of that 128 is taken off, or
    256, the next exponent, if the eighth bit says that the number is negative.
    """
    return f"""
        lop3.b32 sign, {word}, 0x00800080, 0x43004300, 0xea;
        lop3.b32 {pair}, {word}, 0x007f007f, 0x43004300, 0xea;
        sub.bf16x2 {pair}, {pair}, sign;
    """


def _unpack_bytes(*, has_zeros: bool) -> str:
    """Returns instructions that make two pairs of bfloat16 of a word of 8-bit integers."""
    convert = "{ .reg .b32 sign, next; shr.b32 next, $2, 8;"
    for pair, word in (("$0", "$2"), ("$1", "next")):
        convert += _pair_of_bytes(pair, word)
        if has_zeros:
            convert += f"sub.bf16x2 {pair}, {pair}, $4;"
        convert += f"mul.bf16x2 {pair}, {pair}, $3;"
    return convert + "}"


_UNPACK_INTEGERS = gl.constexpr(_unpack(_integers))
_UNPACK_FLOATS = gl.constexpr(_unpack(_floats))
_UNPACK_BYTES = gl.constexpr(_unpack_bytes(has_zeros=False))
_UNPACK_BYTES_WITH_ZEROS = gl.constexpr(_unpack_bytes(has_zeros=True))
_PAIR_OF_BYTES = gl.constexpr("{ .reg .b32 sign; " + _pair_of_bytes("$0", "$1") + " }")
_HALVES = gl.constexpr("prmt.b32 $0, $2, 0, 0x1010; prmt.b32 $1, $2, 0, 0x3232;")
"""The halves of a word, each twice."""
_RANGE = gl.constexpr(0x20002000)
"""Makes both bfloat16 of a word 2^64 times as large."""


@constexpr_function
def group_layout(num_rows, num_groups, num_runs, num_warps=4):
    """Returns the layout of [rows, groups, runs of a group, words of a run].

    Flattened to [rows, words] it is that of the tensor cores' left factor.
    """

    def bits(count, dim):
        powers = [1 << bit for bit in range(count.bit_length() - 1)]
        return [[power if dim == each else 0 for each in range(4)] for power in powers]

    rows = bits(num_rows, 0)
    last_warp = 3 + num_warps.bit_length()
    return gl.DistributedLinearLayout(
        reg_bases=[*bits(num_groups, 1), *bits(num_runs, 2), rows[3], *rows[last_warp:]],
        lane_bases=[*bits(4, 3), *rows[:3]],
        warp_bases=rows[4:last_warp],
        block_bases=[],
        shape=[num_rows, num_groups, num_runs, 4],
    )


@gluon.jit
def _group_values(
    ptr, row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
    NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, HALVES: gl.constexpr,
    IN_TURNS: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Loads one number for each of a tile's groups of columns.

    IN_TURNS: eight rows of the gate and of up take turns, from `row` of both together on.
    """
    WIDTH: gl.constexpr = min(GROUP, COLUMNS)
    GROUPS: gl.constexpr = COLUMNS // WIDTH
    PER_ROW: gl.constexpr = NUM_INPUTS // GROUP
    OUTPUTS: gl.constexpr = ROWS // HALVES
    full: gl.constexpr = group_layout(ROWS, GROUPS, WIDTH // RUN)
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, full))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if IN_TURNS:
        outputs = row // 2 + rows // 16 * 8 + rows % 8
        weight_rows = rows // 8 % 2 * NUM_OUTPUTS + outputs
    else:
        outputs = row + rows % OUTPUTS
        weight_rows = rows // OUTPUTS * NUM_OUTPUTS + outputs
    groups = gl.arange(0, GROUPS, gl.SliceLayout(0, layout)) + column // GROUP
    at = weight_rows[:, None] * PER_ROW + groups[None, :]
    is_inside = (outputs < NUM_OUTPUTS)[:, None] & (groups < PER_ROW)[None, :]
    return gl.load(ptr + at, mask=is_inside, other=0)


@gluon.jit
def pair_of_bfloat16(values):
    """Returns scales as words of two equal bfloat16; those of floats are 2^64 too large.

    A byte is an exponent of two plus 127; loading refuses scales of 2^64 or more. Words are such
    pairs already.
    """
    if values.dtype == gl.int32:
        return values
    elif values.dtype == gl.uint8:  # noqa: RET505  # one branch is compiled
        # Both halves at once: the byte plus 64, moved to the exponent.
        return values.to(gl.int32) * 0x00800080 + 0x20002000
    else:
        bits = values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        return bits | bits << 16


@gluon.jit
def halves_of(words, ARE_SCALES: gl.constexpr):
    """Returns the two bfloat16 of each word, as words that have the same twice.

    ARE_SCALES: both are scales of floats, which become 2^64 larger, as finished expects.
    """
    if ARE_SCALES:
        words += _RANGE
    return gl.inline_asm_elementwise(
        _HALVES, "=&r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _by_words(values, layout: gl.constexpr, WIDTH: gl.constexpr, RUN: gl.constexpr):
    """Repeats the values of groups of WIDTH columns for each of the four words of a run."""
    ROWS: gl.constexpr = values.shape[0]
    GROUPS: gl.constexpr = values.shape[1]
    each = values[:, :, None, None].broadcast_to([ROWS, GROUPS, WIDTH // RUN, 4])
    words = each.reshape([ROWS, GROUPS * WIDTH // RUN * 4])
    of_words: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=1)
    return gl.convert_layout(words, of_words, assert_trivial=True)


@gluon.jit
def tile_scales(
    scale_ptr, zero_ptr, row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, NUM_OUTPUTS: gl.constexpr, NUM_INPUTS: gl.constexpr, HALVES: gl.constexpr,
    IN_TURNS: gl.constexpr = False, NUM_BITS: gl.constexpr = 4,
):  # fmt: skip
    """Returns the scales of a tile's runs, of their first and second halves, and the zeros.

    Integers of 8 bits may have no zeros.
    scale_ptr: words of two scales if GROUP is 16.
    """
    WIDTH: gl.constexpr = max(32, GROUP)
    RUN: gl.constexpr = 128 // NUM_BITS
    scales = _group_values(
        scale_ptr, row, column, ROWS, COLUMNS, WIDTH, NUM_OUTPUTS, NUM_INPUTS, HALVES, IN_TURNS, RUN
    )  # fmt: skip
    if GROUP == 16:
        return halves_of(scales, True)
    elif zero_ptr is not None:  # noqa: RET505  # one branch is compiled
        zeros = _group_values(
            zero_ptr, row, column, ROWS, COLUMNS, GROUP, NUM_OUTPUTS, NUM_INPUTS, HALVES, IN_TURNS,
            RUN,
        )  # fmt: skip
        return scales, scales, zeros.to(gl.int32)
    elif NUM_BITS == 8:
        return scales, scales
    else:
        return scales, scales, gl.full(scales.shape, 8, gl.int32, scales.type.layout)


@gluon.jit
def _eights_of(pairs):
    """Returns the values of words that were unpacked to four pairs, [..., 2, 2, 2].

    These are the element of a pair, and the last and the first bit of the pair's number.
    """
    return gl.join(
        gl.join(_halves_of(pairs[0]), _halves_of(pairs[1])),
        gl.join(_halves_of(pairs[2]), _halves_of(pairs[3])),
    )


@gluon.jit
def floats_of(words, first, second):
    """Returns the eight floats of each word, in the dimensions of _eights_of.

    first, second: scales of the word's pairs, as pair_of_bfloat16 has them.
    """
    pairs = gl.inline_asm_elementwise(
        _UNPACK_FLOATS, "=r,=r,=r,=r,r,r,r", [words, first, second],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _eights_of(pairs)


@gluon.jit
def integers_of(words, first, second, zeros):
    """Returns the eight integers of each word, in the dimensions of _eights_of.

    first, second: scales of the word's pairs, and zeros plus 128; pairs of bfloat16.
    """
    pairs = gl.inline_asm_elementwise(
        _UNPACK_INTEGERS, "=r,=r,=r,=r,r,r,r,r", [words, first, second, zeros],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _eights_of(pairs)


@gluon.jit
def _bytes_of(words, scales, zeros):
    """Returns the four integers of 8 bits of each word, [..., 2, 2].

    These are the element of a pair and the pair's number.
    scales, zeros: pairs of bfloat16; zeros may be None.
    """
    if zeros is None:
        pairs = gl.inline_asm_elementwise(
            _UNPACK_BYTES, "=&r,=&r,r,r", [words, scales],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pairs = gl.inline_asm_elementwise(
            _UNPACK_BYTES_WITH_ZEROS, "=&r,=&r,r,r,r", [words, scales, zeros],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(_halves_of(pairs[0]), _halves_of(pairs[1]))


@gluon.jit
def _unpacked_bytes(words, scales, layout: gl.constexpr):
    """Returns the values of words of 8-bit integers, [rows, columns]."""
    ROWS: gl.constexpr = words.shape[0]
    COLUMNS: gl.constexpr = 4 * words.shape[1]
    WIDTH: gl.constexpr = COLUMNS // scales[0].shape[1]
    factors = _by_words(pair_of_bfloat16(scales[0]), layout, WIDTH, 16)
    if len(scales) == 2:
        fours = _bytes_of(words, factors, None)
    else:
        zeros = scales[2] & 0xFF
        zeros = gl.inline_asm_elementwise(
            _PAIR_OF_BYTES, "=&r,r", [zeros | zeros << 16], dtype=gl.int32, is_pure=True, pack=1
        )
        fours = _bytes_of(words, factors, _by_words(zeros, layout, WIDTH, 16))
    # From words, pairs' elements and halves of a run to columns.
    fours = fours.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute((0, 1, 4, 2, 3))
    return fours.reshape([ROWS, COLUMNS])


@gluon.jit
def _unpacked_eights(words, scales, layout: gl.constexpr):
    """Returns the values of words of 4-bit numbers, [rows, columns]."""
    ROWS: gl.constexpr = words.shape[0]
    COLUMNS: gl.constexpr = 8 * words.shape[1]
    ARE_PAIRS: gl.constexpr = scales[0].dtype == gl.int32
    IS_INTEGER: gl.constexpr = len(scales) == 3 if ARE_PAIRS else scales[0].dtype == gl.bfloat16
    WIDTH: gl.constexpr = COLUMNS // scales[0].shape[1]
    first = _by_words(pair_of_bfloat16(scales[0]), layout, WIDTH, 32)
    second = _by_words(pair_of_bfloat16(scales[1]), layout, WIDTH, 32)
    if IS_INTEGER:
        zeros = scales[2]
        if not ARE_PAIRS:
            zeros = zeros | 0x4300
            zeros = zeros | zeros << 16
        eights = integers_of(words, first, second, _by_words(zeros, layout, WIDTH, 32))
    else:
        eights = floats_of(words, first, second)
    # From words and their pairs' elements, eights and halves of a run to columns.
    eights = eights.reshape([ROWS, COLUMNS // 32, 4, 2, 2, 2]).permute((0, 1, 5, 4, 2, 3))
    return eights.reshape([ROWS, COLUMNS])


@gluon.jit
def unpacked(tile, scales, layout: gl.constexpr, FIRST_ROW: gl.constexpr = 0):
    """Returns rows of a tile as the tensor cores' left factor; there are as many as scales.

    scales: those of tile_scales, of which bfloat16 belong to integers and others to floats. Or, of
        4 bits, pairs of bfloat16: first and second for floats, and 128 plus zeros for integers.
    """
    TILE_ROWS: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = scales[0].shape[0]
    WORDS: gl.constexpr = tile.shape[1] // 4
    shared: gl.constexpr = gl.NVMMASharedLayout(min(128, tile.shape[1]), 32, rank=2)
    of_words: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=1)
    of_each: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    words = reinterpret(tile, gl.int32, [TILE_ROWS, WORDS], shared)
    words = words.slice(FIRST_ROW, ROWS).load(of_words)
    if tile.dtype == gl.int8:
        values = _unpacked_bytes(words, scales, layout)
    else:
        values = _unpacked_eights(words, scales, layout)
    return gl.convert_layout(values, of_each, assert_trivial=True)


@gluon.jit
def finished(sums, scale_ptr):
    """Makes up for the powers of two of floats of 4 bits, 2^-126 and 2^64."""
    if scale_ptr is not None and scale_ptr.dtype.element_ty != gl.bfloat16:
        sums *= 4611686018427387904.0
    return sums


@gluon.jit
def multiply(tile, inputs, scales, sums, layout: gl.constexpr):
    """Adds the product of a tile of any format with inputs [tokens, columns] to the sums."""
    if tile.dtype.primitive_bitwidth == 8:
        return warpgroup_mma(unpacked(tile, scales, layout), inputs.permute((1, 0)), sums)
    else:  # noqa: RET505  # one branch is compiled
        return warpgroup_mma(tile, inputs.permute((1, 0)), sums)
