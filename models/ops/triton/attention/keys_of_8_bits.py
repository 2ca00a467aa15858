"""The inner loop of decode attention over FP8 keys and values."""

import triton
import triton.language as tl

from models.ops.triton.attention.online_softmax import weigh_keys, widened


@triton.jit
def quarter_of(words, SHIFT: tl.constexpr, dtype: tl.constexpr):
    """Returns the FP8 values at one byte of words, converted."""
    return widened(((words >> SHIFT) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True), dtype)


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
        q = (q.to(tl.float32) / q_scale[:, None]).to(tl.float16)
    return q, q_scale


@triton.jit
def attend_keys_of_8_bits(
    q, acc, highest, total, start, end, positions, table_ptr, k_ptr, v_ptr, k_scale_ptr,
    v_scale_ptr, kv_head, dims, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr = 0.0,
):  # fmt: skip
    """Does what attend_keys does on the diagonal, reading values four at a time.

    Tensor cores take pairs of values of two keys, which are far apart in memory: byte by byte that
    is one load each. HEAD_DIM is a multiple of 4. Keys are multiplied in float16, to which FP8
    converts in one instruction, unless queries are float32.
    """
    weight_type: tl.constexpr = q.dtype
    q, q_scale = in_float16(q, ROWS)
    a, b, c, d = split_quarters(acc, ROWS, BLOCK_D)
    words_ptr = v_ptr.to(tl.pointer_type(tl.uint32))
    quarters = tl.arange(0, BLOCK_D // 4)
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        is_key = keys < end
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        in_keys = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + slot[:, None] * HEAD_DIM + dims[None, :], mask=in_keys, other=0.0)
        in_values = is_key[:, None] & (quarters < HEAD_DIM // 4)[None, :]
        at_values = slot[:, None] * (HEAD_DIM // 4) + quarters[None, :]
        words = tl.load(words_ptr + at_values, mask=in_values, other=0)
        k_scale = tl.load(k_scale_ptr + slot, mask=is_key, other=0.0)
        v_scale = tl.load(v_scale_ptr + slot, mask=is_key, other=0.0)
        weights, kept, highest, total = weigh_keys(
            q, widened(k, q.dtype), q_scale[:, None] * k_scale[None, :], highest, total, keys, end,
            positions, scale_log2, True, 0, True, SOFT_CAP,
        )  # fmt: skip
        weights = (weights * v_scale[None, :]).to(weight_type)
        kept = kept[:, None]
        a = tl.dot(weights, quarter_of(words, 0, weight_type), a * kept, input_precision="ieee")
        b = tl.dot(weights, quarter_of(words, 8, weight_type), b * kept, input_precision="ieee")
        c = tl.dot(weights, quarter_of(words, 16, weight_type), c * kept, input_precision="ieee")
        d = tl.dot(weights, quarter_of(words, 24, weight_type), d * kept, input_precision="ieee")
    return join_quarters(a, b, c, d, ROWS, BLOCK_D), highest, total
