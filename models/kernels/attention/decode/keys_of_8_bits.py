"""Decode attention's tiles of FP8 keys and values, and the loop over them.

Keys, and the columns of values, are the rows of either product: tensor cores take rows by 16 and
columns by 8, and a kv head has few queries. Values are read four at a time: tensor cores take pairs
of values of two keys, which are far apart in memory, and byte by byte that is one load each. Both
factors of either product are float16, to which FP8 converts in one instruction, unless queries are
float32.
"""

import triton
import triton.language as tl

from models.kernels.attention.online_softmax import soft_capped, widened

_UNPACK = tl.constexpr(
    "{ .reg .b32 low, high; .reg .b16 a, b, c, d;"
    "prmt.b32 low, $4, $5, 0x5140; prmt.b32 high, $4, $5, 0x7362;"
    "mov.b32 {a, b}, low; mov.b32 {c, d}, high;"
    + "".join(f"cvt.rn.f16x2.e4m3x2 ${byte}, {pair};" for byte, pair in enumerate("abcd"))
    + "}"
)
"""Converts the four bytes of two words, the same byte of both at a time."""
LEAST_UNIT = tl.constexpr(1e-20)
"""Scale of smaller values: sums in larger units must not overflow in this one."""


@triton.jit
def quarter_of(words, SHIFT: tl.constexpr, dtype: tl.constexpr):
    """Returns the FP8 values at one byte of words, converted."""
    return widened(((words >> SHIFT) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), dtype)


@triton.jit
def _bytes(words, dtype: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
    """Returns the numbers in the bytes of words, from the lowest on."""
    if HAS_ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return (
            quarter_of(words, 0, dtype),
            quarter_of(words, 8, dtype),
            quarter_of(words, 16, dtype),
            quarter_of(words, 24, dtype),
        )


@triton.jit
def split_quarters(acc, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns columns 0, 4, 8, ... of acc, then their right neighbours: four of [ROWS, D / 4]."""
    halves = acc.reshape(ROWS, BLOCK_D // 4, 2, 2).permute(0, 1, 3, 2)
    first, second = tl.split(halves)
    a, b = tl.split(first)
    c, d = tl.split(second)
    return a, b, c, d


@triton.jit
def join_quarters(a, b, c, d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Undoes split_quarters."""
    return tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 1, 3, 2).reshape(ROWS, BLOCK_D)


@triton.jit
def in_float16(q, ROWS: tl.constexpr):
    """Returns queries in bfloat16 as float16 and each row's factor; others as they are.

    Divided by a power of two near their largest magnitude, queries fit into float16. Only elements
    below 2^-14 of it change: they round to multiples of 2^-24.
    """
    q_scale = tl.full([ROWS], 1.0, tl.float32)
    if q.dtype == tl.bfloat16:
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q_scale = tl.where(power > 0.0, power, 1.0)
        q = (q.to(tl.float32) * (1.0 / q_scale)[:, None]).to(tl.float16)
    return q, q_scale


@triton.jit
def load_tile(keys, is_key, table_ptr, cache, kv_head, dims, form: tl.constexpr):
    """Returns cached keys of one kv head, [keys, block_d], and their values in words of four.

    The words are turned, [block_d / 4, keys]. Keys and values are each followed by their scales;
    what is no key is zero. form: has num_kv_heads, head_dim, block_size and block_d of DecodeForm.
    """
    quarters = tl.arange(0, form.block_d // 4)
    block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
    slot = (block * form.block_size + keys % form.block_size) * form.num_kv_heads + kv_head
    in_keys = is_key[:, None] & (dims < form.head_dim)[None, :]
    k = tl.load(cache.k + slot[:, None] * form.head_dim + dims[None, :], mask=in_keys, other=0.0)
    in_values = is_key[None, :] & (quarters < form.head_dim // 4)[:, None]
    at_values = slot[None, :] * (form.head_dim // 4) + quarters[:, None]
    words_ptr = cache.v.to(tl.pointer_type(tl.uint32))
    words = tl.load(words_ptr + at_values, mask=in_values, other=0)
    k_scale = tl.load(cache.k_scale + slot, mask=is_key, other=0.0)
    v_scale = tl.load(cache.v_scale + slot, mask=is_key, other=0.0)
    return k, k_scale, words, v_scale


@triton.jit
def fold_words(
    q, q_scale, tile, is_seen, sums, unit, highest, total, scale_log2,
    SOFT_CAP: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Folds a tile into a running softmax: online_softmax.fold_tile, with all matrices turned.

    q: [BLOCK_D, ROWS]. is_seen: [KEYS, ROWS], or [KEYS, 1] if all rows see the same keys.
    sums: the quarters of the weighted values so far, [BLOCK_D / 4, ROWS], divided by `unit`, the
        largest scale of the last tile's values: so weights times scales fit into float16. Scales of
        dummy requests' keys may be negative.
    """
    k, k_scale, words, v_scale = tile
    scores = tl.dot(widened(k, q.dtype), q, input_precision="ieee") * k_scale[:, None]
    factor = q_scale * scale_log2
    if SOFT_CAP > 0.0:
        scores = soft_capped(scores * q_scale[None, :], scale_log2, SOFT_CAP)
        factor = tl.full(q_scale.shape, 1.0, tl.float32)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 0) * factor)
    weights = tl.exp2(scores * factor[None, :] - new_highest[None, :])
    kept = tl.exp2(highest - new_highest)
    total = total * kept + tl.sum(weights, 0)
    largest = tl.max(tl.abs(v_scale), 0)
    # A tile without keys keeps the unit.
    new_unit = tl.where(largest > 0.0, tl.maximum(largest, LEAST_UNIT), unit)
    per_unit = 1.0 / new_unit
    weights = (weights * (v_scale * per_unit)[:, None]).to(q.dtype)
    kept = (kept * (unit * per_unit))[None, :]
    a, b, c, d = sums
    e, f, g, h = _bytes(words, q.dtype, HAS_ASSEMBLY)
    a = tl.dot(e, weights, a * kept, input_precision="ieee")
    b = tl.dot(f, weights, b * kept, input_precision="ieee")
    c = tl.dot(g, weights, c * kept, input_precision="ieee")
    d = tl.dot(h, weights, d * kept, input_precision="ieee")
    return (a, b, c, d), new_unit, new_highest, total


@triton.jit
def attend_keys_of_8_bits(
    q, q_scale, acc, highest, total, start, end, held, table_ptr, cache, kv_head, dims, scale_log2,
    form: tl.constexpr,
):  # fmt: skip
    """Does what attend_keys does for queries that see all keys in [start, end).

    q, q_scale: of in_float16. held: tile of the first held_keys keys, if any. form: DecodeForm,
    whose head_dim is a multiple of 4.
    """
    q = tl.trans(q)
    a, b, c, d = split_quarters(acc, form.rows, form.block_d)
    sums = (tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d))
    unit = 1.0
    if form.held_keys > 0:
        is_held = (start + tl.arange(0, form.held_keys) < end)[:, None]
        sums, unit, highest, total = fold_words(
            q, q_scale, held, is_held, sums, unit, highest, total, scale_log2, form.soft_cap,
            form.has_assembly,
        )  # fmt: skip
        start += form.held_keys
    if form.held_keys == 0 or start < end:
        for first in tl.range(start, end, form.keys, num_stages=form.stages):
            keys = first + tl.arange(0, form.keys)
            is_key = keys < end
            tile = load_tile(keys, is_key, table_ptr, cache, kv_head, dims, form)
            sums, unit, highest, total = fold_words(
                q, q_scale, tile, is_key[:, None], sums, unit, highest, total, scale_log2,
                form.soft_cap, form.has_assembly,
            )  # fmt: skip
    a, b, c, d = sums
    acc = join_quarters(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), form.rows, form.block_d)
    return acc * unit, highest, total
