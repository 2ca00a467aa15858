"""Transforms, stores and attends to the one new token of a request."""

import triton
import triton.language as tl

from models.kernels.attention.cache.cache_scales import scale_of
from models.kernels.attention.online_softmax import soft_capped

_TOGETHER = tl.constexpr(
    "{ .reg .b32 zero; mov.u32 zero, %smid; shr.u32 zero, zero, 31;"
    ".reg .b32 some; or.b32 some, $2, $3; or.b32 some, some, $4; or.b32 some, some, $5;"
    "or.b32 some, some, $6; or.b32 some, some, $7; or.b32 some, some, $8;"
    "and.b32 some, some, zero; or.b32 $0, $2, some; or.b32 $1, $3, some; }"
)
"""Adds to the first two of seven words a bit of all that is always zero, as no assembler knows."""
_TOGETHER_REGISTERS = tl.constexpr("=&r,=&r,r,r,r,r,r,r,r")


@triton.jit
def partners_of(dims, HEAD_DIM: tl.constexpr):
    """Returns the dimension that each one is rotated with, in the other half of the head."""
    HALF: tl.constexpr = HEAD_DIM // 2
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    # The largest power of two that divides a half: runs of this length have partners in a run.
    RUN: tl.constexpr = HALF & -HALF
    return tl.max_contiguous(tl.multiple_of(partners, RUN), RUN)


@triton.jit
def load_row(ptr, heads, dims, HEAD_DIM: tl.constexpr, is_row=True):
    """Returns HEAD_DIM elements at ptr once for each head, [rows, BLOCK_D]; zeros unless is_row.

    Loads of this shape have the layout of the heads' own: nothing is exchanged between threads.
    """
    in_tile = (heads >= 0)[:, None] & (dims < HEAD_DIM)[None, :] & is_row
    return tl.load(ptr + 0 * heads[:, None] + dims[None, :], mask=in_tile, other=0.0)


@triton.jit
def load_gains(
    q_weight_ptr, k_weight_ptr, heads, dims, partners,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Returns the norms' weights at dims and at partners, of queries and of keys; ones without."""
    if HAS_NORM:
        return (
            load_row(q_weight_ptr, heads, dims, HEAD_DIM).to(tl.float32),
            load_row(q_weight_ptr, heads, partners, HEAD_DIM).to(tl.float32),
            load_row(k_weight_ptr, heads, dims, HEAD_DIM).to(tl.float32),
            load_row(k_weight_ptr, heads, partners, HEAD_DIM).to(tl.float32),
        )
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        return 1.0, 1.0, 1.0, 1.0


@triton.jit
def attend_newest(
    q_ptr, new, strides, slots_ptr, cache, token, kv_head, heads, in_group, dims, partners, gains,
    is_last, highest, total, scale_log2, eps, form: tl.constexpr,
):  # fmt: skip
    """Transforms queries and the newest key, stores that key and its value, and attends to them.

    gains: of load_gains. Only a program with is_last stores and sees the key. Returns the queries
    and the weighted value, both [rows, BLOCK_D], highest and total. form.gathers: all loads are on
    their way before the first is waited for.
    """
    q_gain, q_partner_gain, k_gain, k_partner_gain = gains
    slot = tl.load(slots_ptr + token)
    q_ptrs = q_ptr + (token * strides.q + kv_head * form.group + heads)[:, None] * form.head_dim
    in_heads = in_group[:, None] & (dims < form.head_dim)[None, :]
    q = tl.load(q_ptrs + dims[None, :], mask=in_heads, other=0.0)
    q_partner = tl.load(q_ptrs + partners[None, :], mask=in_heads, other=0.0)
    at_key = (token * strides.k + kv_head) * form.head_dim
    key = load_row(new.k + at_key, heads, dims, form.head_dim)
    key_partner = load_row(new.k + at_key, heads, partners, form.head_dim)
    at_rotation = token * strides.rotation * form.head_dim
    cos = load_row(new.cos + at_rotation, heads, dims, form.head_dim)
    sin = load_row(new.sin + at_rotation, heads, dims, form.head_dim)
    at_value = (token * strides.v + kv_head) * form.head_dim
    value = load_row(new.v + at_value, heads, dims, form.head_dim, is_last)
    if form.gathers and q.dtype.primitive_bitwidth == 16 and cos.dtype == q.dtype:
        q, key = together(q, key, q_partner, key_partner, cos, sin, value)
    q = transformed(
        q, q_partner, q_gain, q_partner_gain, cos, sin, eps, form.head_dim, form.has_norm
    )
    q = q.to(q_ptr.dtype.element_ty)
    key = transformed(
        key, key_partner, k_gain, k_partner_gain, cos, sin, eps, form.head_dim, form.has_norm
    )
    key, value = store_newest(key, value, cache, slot, kv_head, dims, is_last, form)
    weight, highest, total = see_newest(q, key, is_last, highest, total, scale_log2, form.soft_cap)
    return q, weight[:, None] * value, highest, total


@triton.jit
def together(q, key, q_partner, key_partner, cos, sin, value):
    """Returns q and key, which no instruction reads before all arguments are being loaded.

    The assembler moves loads down to their first uses, so that each waits for memory by itself.
    """
    return tl.inline_asm_elementwise(
        _TOGETHER,
        _TOGETHER_REGISTERS,
        [q, key, q_partner, key_partner, cos, sin, value],
        dtype=(q.dtype, key.dtype),
        is_pure=True,
        pack=2,
    )


@triton.jit
def transformed(
    x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Returns heads [rows, BLOCK_D], normalised if HAS_NORM, then rotated, in float32.

    partner: the heads at partners_of the dimensions. The sine carries the sign of its half.
    """
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= scale * gain
        partner *= scale * partner_gain
    return x * cos.to(tl.float32) + partner * sin.to(tl.float32)


@triton.jit
def store_newest(key, value, cache, slot, kv_head, dims, is_last, form: tl.constexpr):
    """Stores one token's key and value if is_last, unless their slot is in block 0.

    key, value: [rows, BLOCK_D], equal rows. Returns both as read back from the cache, in float32.
    """
    # Dummy requests share block 0: writing while others read it would make their outputs, which
    # tests of graphs compare, depend on the order of programs.
    has_slot = (slot >= form.block_size) & is_last
    at_head = slot * form.num_kv_heads + kv_head
    rows = tl.arange(0, key.shape[0])
    if form.has_scales:
        value = value.to(tl.float32)
        key_scale = scale_of(tl.max(tl.abs(key), 1))
        value_scale = scale_of(tl.max(tl.abs(value), 1))
        tl.store(cache.k_scale + at_head + 0 * rows, key_scale, mask=has_slot & (rows == 0))
        tl.store(cache.v_scale + at_head + 0 * rows, value_scale, mask=has_slot & (rows == 0))
        key /= key_scale[:, None]
        value /= value_scale[:, None]
    key = key.to(cache.k.dtype.element_ty)
    value = value.to(cache.v.dtype.element_ty)
    in_head = has_slot & (dims < form.head_dim)[None, :] & (rows == 0)[:, None]
    at_dims = at_head * form.head_dim + 0 * rows[:, None] + dims[None, :]
    tl.store(cache.k + at_dims, key, mask=in_head)
    tl.store(cache.v + at_dims, value, mask=in_head)
    key, value = key.to(tl.float32), value.to(tl.float32)
    if form.has_scales:
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
