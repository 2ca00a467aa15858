"""Loops over keys and values of 8 bits of which each row of queries sees those up to its own.

Both factors of either product are float16, as in keys_of_8_bits.
"""

import triton
import triton.language as tl

from models.kernels.attention.decode.keys_of_8_bits import (
    LEAST_UNIT,
    fold_words,
    in_float16,
    join_quarters,
    load_tile,
)
from models.kernels.attention.online_softmax import soft_capped


@triton.jit
def attend_with_keys_as_rows(
    q, rows_end, rows_start, highest, total, start, end, table_ptr, cache, kv_head, dims,
    scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Folds the keys in [start, end) into a running softmax that has seen no value.

    Each row sees those in [rows_start, rows_end). form: FewForm.
    """
    q, q_scale = in_float16(q, form.rows)
    q = tl.trans(q)
    nothing = tl.full([form.block_d // 4, form.rows], 0.0, tl.float32)
    sums = (nothing, nothing, nothing, nothing)
    unit = 1.0
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        tile = load_tile(keys, keys < end, table_ptr, cache, kv_head, dims, form)
        is_seen = keys[:, None] < rows_end[None, :]
        if form.window != 0:
            is_seen = is_seen & (keys[:, None] >= rows_start[None, :])
        sums, unit, highest, total = fold_words(
            q, q_scale, tile, is_seen, sums, unit, highest, total, scale_log2, form.soft_cap,
            form.has_assembly,
        )  # fmt: skip
    a, b, c, d = sums
    acc = join_quarters(tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), form.rows, form.block_d)
    return acc * unit, highest, total


@triton.jit
def attend_with_queries_as_rows(
    q, rows_end, rows_start, highest, total, start, end, table_ptr, cache, kv_head, dims,
    scale_log2, form: tl.constexpr,
):  # fmt: skip
    """Does what attend_with_keys_as_rows does; a tile has 64 rows of queries, as wgmma takes."""
    q, q_scale = in_float16(q, form.rows)
    acc = tl.full([form.rows, form.block_d], 0.0, tl.float32)
    unit = 1.0
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        is_key = keys < end
        block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
        slot = (block * form.block_size + keys % form.block_size) * form.num_kv_heads + kv_head
        at_keys = slot[:, None] * form.head_dim + dims[None, :]
        in_keys = is_key[:, None] & (dims < form.head_dim)[None, :]
        k = tl.load(cache.k + at_keys, mask=in_keys, other=0.0).to(q.dtype)
        v = tl.load(cache.v + at_keys, mask=in_keys, other=0.0).to(q.dtype)
        # Together they are as many as threads: else each thread would load those of its columns.
        at_scales = tl.join(cache.k_scale + slot, cache.v_scale + slot)
        k_scale, v_scale = tl.split(tl.load(at_scales, mask=is_key[:, None], other=0.0))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * k_scale[None, :]
        factor = q_scale * scale_log2
        if form.soft_cap > 0.0:
            scores = soft_capped(scores * q_scale[:, None], scale_log2, form.soft_cap)
            factor = tl.full(q_scale.shape, 1.0, tl.float32)
        is_seen = keys[None, :] < rows_end[:, None]
        if form.window != 0:
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
