"""Reads, writes and waits for rows as vectors of 16 bytes, four words each.

A word is two elements of 16 bits. In memory that ranks share, the word 0 means that nothing has
arrived: two zeros are sent as two negative zeros.
"""

import triton
import triton.language as tl

_NOTHING = tl.constexpr(0)
_NEGATIVE_ZEROS = tl.constexpr(-0x7FFF8000)  # 0x80008000


@triton.jit
def load_words(address, is_wanted):
    """Loads a vector from each address; zeros where it is not wanted."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_wanted;
            setp.ne.s32 is_wanted, $5, 0;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            mov.u32 $3, 0;
            @is_wanted ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [address, is_wanted.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_words(address, words, is_wanted):
    """Stores a vector to each address in this GPU's memory."""
    a, b, c, d = words
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_wanted;
            setp.ne.s32 is_wanted, $6, 0;
            @is_wanted st.global.v4.b32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r",
        [address, a, b, c, d, is_wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_bytes(address, low, high, is_wanted):
    """Stores two words of four bytes to each address in this GPU's memory."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_wanted;
            setp.ne.s32 is_wanted, $4, 0;
            @is_wanted st.global.v2.b32 [$1], {$2, $3};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [address, low, high, is_wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def send_words(address, words, is_wanted):
    """Stores a vector to each address in any rank's memory, for `wait_for_words`."""
    a, b, c, d = words
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_wanted;
            setp.ne.s32 is_wanted, $6, 0;
            @is_wanted st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r",
        [address, _visible(a), _visible(b), _visible(c), _visible(d), is_wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for_words(address, is_wanted, max_cycles):
    """Waits until a vector has arrived at each address; then clears it.

    Words may arrive one by one, so all four are waited for. Returns the words and whether they were
    late, in which case they are incomplete.
    """
    a, b, c, d, is_late = tl.inline_asm_elementwise(
        """
        {
            .reg .pred is_wanted, is_missing, is_early;
            .reg .u64 now, until;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            mov.u32 $3, 0;
            mov.u32 $4, 0;
            setp.ne.s32 is_wanted, $6, 0;
            @!is_wanted bra DONE;
            mov.u64 until, %clock64;
            add.u64 until, until, $7;
        AGAIN:
            ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$5];
            setp.eq.s32 is_missing, $0, 0;
            setp.eq.or.s32 is_missing, $1, 0, is_missing;
            setp.eq.or.s32 is_missing, $2, 0, is_missing;
            setp.eq.or.s32 is_missing, $3, 0, is_missing;
            @!is_missing bra DONE;
            mov.u64 now, %clock64;
            setp.lt.u64 is_early, now, until;
            @is_early bra AGAIN;
            mov.u32 $4, 1;
        DONE:
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,l,r,l",
        [address, is_wanted.to(tl.int32), tl.zeros_like(address) + max_cycles],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    nothing = tl.zeros_like(a)
    store_words(address, (nothing, nothing, nothing, nothing), is_wanted)
    return (a, b, c, d), is_late


@triton.jit
def as_sent(words):
    """Returns words in which two zeros, whose signs get lost on the way, are positive."""
    a, b, c, d = words
    return _positive(a), _positive(b), _positive(c), _positive(d)


@triton.jit
def elements(words, DTYPE: tl.constexpr):
    """Returns the eight elements of each vector, float32."""
    a, b, c, d = words
    return (
        _low(a, DTYPE), _high(a, DTYPE), _low(b, DTYPE), _high(b, DTYPE),
        _low(c, DTYPE), _high(c, DTYPE), _low(d, DTYPE), _high(d, DTYPE),
    )  # fmt: skip


@triton.jit
def words_of(vector, DTYPE: tl.constexpr):
    """Returns the words of eight elements, rounded to DTYPE."""
    a, b, c, d, e, f, g, h = vector
    return _word(a, b, DTYPE), _word(c, d, DTYPE), _word(e, f, DTYPE), _word(g, h, DTYPE)


@triton.jit
def added(first, second):
    """Returns the sums of two vectors of elements."""
    a, b, c, d, e, f, g, h = first
    i, j, k, l, m, n, o, p = second  # noqa: E741  # eight in a row
    return a + i, b + j, c + k, d + l, e + m, f + n, g + o, h + p


@triton.jit
def multiplied(first, second):
    """Returns the products of two vectors of elements, element by element."""
    a, b, c, d, e, f, g, h = first
    i, j, k, l, m, n, o, p = second  # noqa: E741  # eight in a row
    return a * i, b * j, c * k, d * l, e * m, f * n, g * o, h * p


@triton.jit
def largest(vector):
    """Returns the largest absolute value of each vector's elements."""
    a, b, c, d, e, f, g, h = vector
    return tl.maximum(
        tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d))),
        tl.maximum(tl.maximum(tl.abs(e), tl.abs(f)), tl.maximum(tl.abs(g), tl.abs(h))),
    )


@triton.jit
def square_sum(vector):
    """Returns the sum of the squares of each vector's elements."""
    a, b, c, d, e, f, g, h = multiplied(vector, vector)
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@triton.jit
def _low(word, DTYPE: tl.constexpr):
    return (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, DTYPE: tl.constexpr):
    return (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _visible(word):
    return tl.where(word == _NOTHING, _NEGATIVE_ZEROS, word)


@triton.jit
def _positive(word):
    return tl.where(word == _NEGATIVE_ZEROS, 0, word)
