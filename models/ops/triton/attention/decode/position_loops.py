"""Loops over keys and values of 8 bits of which each row of queries sees those up to its own.

Both factors of either product are float16, as in keys_of_8_bits.
"""

import triton
import triton.language as tl

from models.ops.triton.attention.decode.keys_of_8_bits import (
    LEAST_UNIT,
    fold_words,
    in_float16,
    join_quarters,
    load_tile,
)
from models.ops.triton.attention.online_softmax import soft_capped


@triton.jit
def attend_with_keys_as_rows(
    q, rows_end, rows_start, highest, total, start, end, table_ptr, pointers, kv_head, dims,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Folds the keys in [start, end) into a running softmax that has seen no value.

    Each row sees those in [rows_start, rows_end).
    """
    q, q_scale = in_float16(q, ROWS)
    q = tl.trans(q)
    nothing = tl.zeros([BLOCK_D // 4, ROWS], tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    unit = 1.0
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        tile = load_tile(
            keys, keys < end, table_ptr, pointers, kv_head, dims,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
        is_seen = keys[:, None] < rows_end[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (keys[:, None] >= rows_start[None, :])
        sums, unit, highest, total = fold_words(
            q, q_scale, tile, is_seen, sums, unit, highest, total, scale_log2, SOFT_CAP,
            HAS_ASSEMBLY,
        )  # fmt: skip
    a, b, c, d = sums
    acc = join_quarters(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), ROWS, BLOCK_D)
    return acc * unit, highest, total


@triton.jit
def attend_with_queries_as_rows(
    q, rows_end, rows_start, highest, total, start, end, table_ptr, pointers, kv_head, dims,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Does what attend_with_keys_as_rows does; a tile has 64 rows of queries, as wgmma takes."""
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = pointers
    q, q_scale = in_float16(q, ROWS)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    unit = 1.0
    for first in tl.range(start, end, KEYS, num_stages=STAGES):
        keys = first + tl.arange(0, KEYS)
        is_key = keys < end
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        at_keys = slot[:, None] * HEAD_DIM + dims[None, :]
        in_keys = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at_keys, mask=in_keys, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + at_keys, mask=in_keys, other=0.0).to(q.dtype)
        # Together they are as many as threads: else each thread would load those of its columns.
        at_scales = tl.join(k_scale_ptr + slot, v_scale_ptr + slot)
        k_scale, v_scale = tl.split(tl.load(at_scales, mask=is_key[:, None], other=0.0))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * k_scale[None, :]
        factor = q_scale * scale_log2
        if SOFT_CAP > 0.0:
            scores = soft_capped(scores * q_scale[:, None], scale_log2, SOFT_CAP)
            factor = tl.full(q_scale.shape, 1.0, tl.float32)
        is_seen = keys[None, :] < rows_end[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (keys[None, :] >= rows_start[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor[:, None] - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        highest = new_highest
        largest = tl.max(tl.abs(v_scale), 0)
        new_unit = tl.where(largest > 0.0, tl.maximum(largest, LEAST_UNIT), unit)
        per_unit = 1.0 / new_unit
        weights = (weights * (v_scale * per_unit)[None, :]).to(q.dtype)
        acc = tl.dot(weights, v, acc * (kept * (unit * per_unit))[:, None], input_precision="ieee")
        unit = new_unit
    return acc * unit, highest, total
