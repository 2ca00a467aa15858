"""What a request's one new token brings: its heads are transformed, stored, and seen at once."""

import triton
import triton.language as tl

from models.ops.triton.cache_scales import scale_of


@triton.jit
def load_transformed(
    ptrs, dims, in_rows, weight_ptr, cos_ptr, sin_ptr, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Returns the heads at ptrs [rows, 1], normalised if HAS_NORM, then rotated, in float32."""
    HALF: tl.constexpr = HEAD_DIM // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    is_dim = dims < HEAD_DIM
    in_tile = in_rows[:, None] & is_dim[None, :]
    x = tl.load(ptrs + dims[None, :], mask=in_tile, other=0.0).to(tl.float32)
    partner = tl.load(ptrs + partners[None, :], mask=in_tile, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        x *= scale * weight[None, :]
        weight = tl.load(weight_ptr + partners, mask=is_dim, other=0.0).to(tl.float32)
        partner *= scale * weight[None, :]
    cos = tl.load(cos_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    # The sine carries the sign of its half.
    sin = tl.load(sin_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def store_newest(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, new_k_ptr, new_v_ptr, slot, kv_head, dims,
    weight_ptr, cos_ptr, sin_ptr, eps,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Stores one token's key, transformed, and its value, unless their slot is in block 0.

    Returns both as the cache gives them back, [1, BLOCK_D] in float32.
    """
    heads = kv_head + tl.arange(0, 1)
    # Block 0 is nobody's. Requests that only fill up a step share it: writing while others read it
    # would make their outputs, by which graphs are tested, depend on who comes first.
    has_slot = heads * 0 + slot >= BLOCK_SIZE
    is_dim = (dims < HEAD_DIM)[None, :]
    in_head = has_slot[:, None] & is_dim
    at_new = heads[:, None] * HEAD_DIM
    key = load_transformed(
        new_k_ptr + at_new, dims, heads >= 0, weight_ptr, cos_ptr, sin_ptr, eps, HEAD_DIM, HAS_NORM
    )
    value = tl.load(new_v_ptr + at_new + dims[None, :], mask=is_dim, other=0.0)
    at_head = slot * NUM_KV_HEADS + heads
    at_slot = at_head[:, None] * HEAD_DIM + dims[None, :]
    if HAS_SCALES:
        value = value.to(tl.float32)
        key_scale = scale_of(tl.max(tl.abs(key), 1))
        value_scale = scale_of(tl.max(tl.abs(value), 1))
        tl.store(k_scale_ptr + at_head, key_scale, mask=has_slot)
        tl.store(v_scale_ptr + at_head, value_scale, mask=has_slot)
        key /= key_scale[:, None]
        value /= value_scale[:, None]
    key = key.to(k_ptr.dtype.element_ty)
    value = value.to(v_ptr.dtype.element_ty)
    tl.store(k_ptr + at_slot, key, mask=in_head)
    tl.store(v_ptr + at_slot, value, mask=in_head)
    key, value = key.to(tl.float32), value.to(tl.float32)
    if HAS_SCALES:
        key *= key_scale[:, None]
        value *= value_scale[:, None]
    return key, value


@triton.jit
def fold_key(q, key, value, acc, highest, total, scale_log2):
    """Folds one key and its value, [1, BLOCK_D] in float32, into a running softmax: fold_tile."""
    score = tl.sum(q.to(tl.float32) * key, 1) * scale_log2
    new_highest = tl.maximum(highest, score)
    weight = tl.exp2(score - new_highest)
    kept = tl.exp2(highest - new_highest)
    return acc * kept[:, None] + weight[:, None] * value, new_highest, total * kept + weight
