"""Transforms, stores and attends to the one new token of a request."""

import triton
import triton.language as tl

from models.ops.triton.attention.cache_scales import scale_of
from models.ops.triton.attention.online_softmax import soft_capped


@triton.jit
def partners_of(dims, HEAD_DIM: tl.constexpr):
    """Returns the dimension that each one is rotated with, in the other half of the head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    # The largest power of two that divides a half: runs of this length have partners in a run.
    RUN: tl.constexpr = HALF & -HALF
    return tl.max_contiguous(tl.multiple_of(partners, RUN), RUN)


@triton.jit
def load_gain(weight_ptr, dims, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Returns the weight of a norm at dims in float32, ones without a norm."""
    if HAS_NORM:
        return tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return tl.full(dims.shape, 1.0, tl.float32)


@triton.jit
def load_gains(
    q_weight_ptr, k_weight_ptr, dims, partners, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Returns the norms' weights at dims and at partners, of queries and of keys."""
    return (
        load_gain(q_weight_ptr, dims, HEAD_DIM, HAS_NORM),
        load_gain(q_weight_ptr, partners, HEAD_DIM, HAS_NORM),
        load_gain(k_weight_ptr, dims, HEAD_DIM, HAS_NORM),
        load_gain(k_weight_ptr, partners, HEAD_DIM, HAS_NORM),
    )


@triton.jit
def attend_newest(
    q_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr,
    v_scale_ptr, token, kv_head, heads, in_group, dims, partners, gains, is_last, highest, total,
    q_stride, new_k_stride, new_v_stride, rotation_stride, scale_log2, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Transforms queries and the newest key, stores that key and its value, and attends to them.

    gains: of load_gains. Only a program with is_last stores and sees the key. Returns the queries,
    [rows, BLOCK_D], the weighted value, [ROWS, BLOCK_D], highest and total.
    """
    q_gain, q_partner_gain, k_gain, k_partner_gain = gains
    at_rotation = token * rotation_stride * HEAD_DIM
    is_dim = dims < HEAD_DIM
    cos = tl.load(cos_ptr + at_rotation + dims, mask=is_dim, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at_rotation + dims, mask=is_dim, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    at_key = (token * new_k_stride + kv_head) * HEAD_DIM
    key = load_transformed(
        new_k_ptr + at_key + 0 * heads[:, None], dims, partners, heads >= 0, k_gain,
        k_partner_gain, cos, sin, eps, HEAD_DIM, HAS_NORM,
    )  # fmt: skip
    at_value = (token * new_v_stride + kv_head) * HEAD_DIM + dims[None, :]
    value = tl.load(new_v_ptr + at_value, mask=is_dim[None, :] & is_last, other=0.0)
    q_ptrs = q_ptr + (token * q_stride + kv_head * GROUP + heads)[:, None] * HEAD_DIM
    q = load_transformed(
        q_ptrs, dims, partners, in_group, q_gain, q_partner_gain, cos, sin, eps,
        HEAD_DIM, HAS_NORM,
    ).to(q_ptr.dtype.element_ty)  # fmt: skip
    key, value = store_newest(
        key, value, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, kv_head, dims, is_last,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HAS_SCALES,
    )  # fmt: skip
    weight, highest, total = see_newest(q, key, is_last, highest, total, scale_log2, SOFT_CAP)
    return q, repeated(weight, ROWS)[:, None] * value, highest, total


@triton.jit
def load_transformed(
    ptrs, dims, partners, in_rows, gain, partner_gain, cos, sin, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Returns the heads at ptrs [rows, 1], normalised if HAS_NORM, then rotated, in float32.

    cos, sin: [BLOCK_D]; the sine carries the sign of its half.
    """
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(ptrs + dims[None, :], mask=in_tile, other=0.0).to(tl.float32)
    partner = tl.load(ptrs + partners[None, :], mask=in_tile, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= scale * gain[None, :]
        partner *= scale * partner_gain[None, :]
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def store_newest(
    key, value, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot, kv_head, dims, is_last,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Stores one token's key and value if is_last, unless their slot is in block 0.

    key: [rows, BLOCK_D], equal rows. value: [1, BLOCK_D]. Returns both as read back from the cache,
        in float32.
    """
    # Dummy requests share block 0: writing while others read it would make their outputs, which
    # tests of graphs compare, depend on the order of programs.
    has_slot = (slot >= BLOCK_SIZE) & is_last
    at_head = slot * NUM_KV_HEADS + kv_head
    rows = tl.arange(0, key.shape[0])
    if HAS_SCALES:
        value = value.to(tl.float32)
        key_scale = scale_of(tl.max(tl.abs(key), 1))
        value_scale = scale_of(tl.max(tl.abs(value), 1))
        tl.store(k_scale_ptr + at_head + rows, key_scale, mask=has_slot & (rows == 0))
        one = tl.arange(0, 1)
        tl.store(v_scale_ptr + at_head + one, value_scale, mask=has_slot & (one == 0))
        key /= key_scale[:, None]
        value /= value_scale[:, None]
    key = key.to(k_ptr.dtype.element_ty)
    value = value.to(v_ptr.dtype.element_ty)
    in_head = has_slot & (dims < HEAD_DIM)[None, :]
    at_dims = at_head * HEAD_DIM + dims[None, :]
    tl.store(k_ptr + at_dims + 0 * rows[:, None], key, mask=in_head & (rows == 0)[:, None])
    tl.store(v_ptr + at_dims, value, mask=in_head)
    key, value = key.to(tl.float32), value.to(tl.float32)
    if HAS_SCALES:
        key *= key_scale[:, None]
        value *= value_scale[:, None]
    return key, value


@triton.jit
def see_newest(q, key, is_last, highest, total, scale_log2, SOFT_CAP: tl.constexpr = 0.0):
    """Adds the newest key, if is_last, to a softmax that has seen at most a sink: weigh_keys.

    Returns the key's weight, highest and total.
    """
    score = tl.sum(q.to(tl.float32) * key, 1)
    if SOFT_CAP > 0.0:
        score = soft_capped(score, scale_log2, SOFT_CAP)
    else:
        score *= scale_log2
    score = tl.where(is_last, score, float("-inf"))
    new_highest = tl.maximum(highest, score)
    weight = tl.exp2(score - new_highest)
    return weight, new_highest, total * tl.exp2(highest - new_highest) + weight


@triton.jit
def repeated(x, ROWS: tl.constexpr):
    """Repeats the rows of x until there are ROWS; both counts are powers of two."""
    TIMES: tl.constexpr = ROWS // x.shape[0]
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[None, :], (TIMES, x.shape[0])), (ROWS,))
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        wide = tl.broadcast_to(x[None, :, :], (TIMES, x.shape[0], x.shape[1]))
        return tl.reshape(wide, (ROWS, x.shape[1]))
