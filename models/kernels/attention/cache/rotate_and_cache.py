"""Head norms, rotary positions and the write to the cache, in one kernel."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.arithmetic.mean_square import mean_of, units_of
from models.kernels.attention.cache.cache_scales import scale_of
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kv_cache import KVCacheData
from models.operands.head_transform import HeadTransform

FEW_TOKENS = 64
"""Up to this many tokens, a program does one head of one token, so that decode steps have enough
programs."""

_VARYING = [
    "slots_ptr", "num_tokens", "q_stride", "k_stride", "v_stride", "kept_stride",
    "rotation_stride",
]  # fmt: skip


@triton.jit
def _load_heads(ptr, tokens, stride, head, dims, in_tile, HEAD_DIM: tl.constexpr):
    """Returns the two halves of one head of each token."""
    ptrs = ptr + (tokens[:, None] * stride + head) * HEAD_DIM + dims[None, :]
    first = tl.load(ptrs, mask=in_tile, other=0.0)
    return first, tl.load(ptrs + HEAD_DIM // 2, mask=in_tile, other=0.0)


@triton.jit
def _load_gains(weight_ptr, dims, in_half, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Returns a norm's weights for the two halves of a head, ones without a norm."""
    if HAS_NORM:
        first = tl.load(weight_ptr + dims, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(weight_ptr + HEAD_DIM // 2 + dims, mask=in_half, other=0.0)
        return first, second.to(tl.float32)
    else:  # noqa: RET505  # one branch is compiled, and a Triton function returns at its end
        ones = tl.full(dims.shape, 1.0, tl.float32)
        return ones, ones


@triton.jit
def _load_rotation(cos_ptr, sin_ptr, tokens, stride, dims, in_tile, HEAD_DIM: tl.constexpr):
    """Returns cosines and sines of the second half of each token's heads."""
    at_rotation = tokens[:, None] * stride * HEAD_DIM + dims[None, :]
    cos = tl.load(cos_ptr + at_rotation, mask=in_tile, other=0.0).to(tl.float32)
    # The table's first half carries the minus sign of the first half's sine.
    sin = tl.load(sin_ptr + at_rotation + HEAD_DIM // 2, mask=in_tile, other=0.0)
    return cos, sin.to(tl.float32)


@triton.jit
def _transform(
    first, second, gains, rotation, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Returns the two halves of heads in float32, normalised if HAS_NORM, then rotated.

    ROUNDS: they are rounded to their type after each, as two operators do.
    """
    DTYPE: tl.constexpr = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if HAS_NORM:
        if ROUNDS:
            largest = tl.maximum(tl.max(first * first, 1), tl.max(second * second, 1))
            units = units_of(first * first, largest[:, None])
            units += units_of(second * second, largest[:, None])
            mean = mean_of(tl.sum(units, 1), largest, HEAD_DIM)
        else:
            mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        first = first * scale * gains[0][None, :]
        second = second * scale * gains[1][None, :]
        if ROUNDS:
            first = first.to(DTYPE).to(tl.float32)
            second = second.to(DTYPE).to(tl.float32)
    cos, sin = rotation
    rotated = first * cos - second * sin
    second = second * cos + first * sin
    if ROUNDS:
        rotated = rotated.to(DTYPE).to(tl.float32)
        second = second.to(DTYPE).to(tl.float32)
    return rotated, second


@triton.jit
def _store(
    cache_ptr, scale_ptr, slots, head, dims, first, second, in_tile,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Stores the two halves of one head of each token; returns them as the cache holds them."""
    is_stored = slots >= 0
    in_tile = in_tile & is_stored[:, None]
    heads = slots * NUM_KV_HEADS + head
    scale = 1.0
    if HAS_SCALES:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = scale_of(largest.to(tl.float32))
        tl.store(scale_ptr + heads, scale, mask=is_stored)
        scale = scale[:, None]
        first = first.to(tl.float32) / scale
        second = second.to(tl.float32) / scale
    at_cache = heads[:, None] * HEAD_DIM + dims[None, :]
    first = first.to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + at_cache, first, mask=in_tile)
    second = second.to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + at_cache + HEAD_DIM // 2, second, mask=in_tile)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if HAS_SCALES:
        first, second = first * scale, second * scale
    return first, second


@triton.jit
def _keep(
    kept_ptr, first, second, tokens, stride, head, dims, in_tile, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Stores the two halves of one head of each token in a step's tensor, unless there is none."""
    if kept_ptr is not None:
        ptrs = kept_ptr + (tokens[:, None] * stride + head) * HEAD_DIM + dims[None, :]
        dtype = kept_ptr.dtype.element_ty
        tl.store(ptrs, first.to(dtype), mask=in_tile)
        tl.store(ptrs + HEAD_DIM // 2, second.to(dtype), mask=in_tile)


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=_VARYING)
def _rotate_and_cache_kernel(
    q_ptr, k_ptr, v_ptr, rotated_q_ptr, kept_k_ptr, kept_v_ptr, k_cache_ptr, v_cache_ptr,
    k_scale_ptr, v_scale_ptr, slots_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    num_tokens, q_stride, k_stride, v_stride, kept_stride, rotation_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_ROTATION: tl.constexpr, HAS_NORM: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, HAS_SCALES: tl.constexpr, ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does one head of TOKENS tokens: key heads first, then value heads, then query heads.

    Strides count heads: the compiler then knows that each head starts at a multiple of its size,
    and loads 16 bytes at a time. kept_k_ptr, kept_v_ptr None: the cache alone takes the keys, or
    values.
    """
    let_next_start(DEPENDENT)
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HEAD_DIM // 2
    tokens = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_tokens = tokens < num_tokens
    in_tile = in_tokens[:, None] & in_half[None, :]
    head = tl.program_id(0)
    if head < NUM_KV_HEADS:
        gains = _load_gains(k_weight_ptr, dims, in_half, HEAD_DIM, HAS_NORM)
        wait_for_previous(DEPENDENT)
        slots = tl.load(slots_ptr + tokens, mask=in_tokens, other=-1)
        first, second = _load_heads(k_ptr, tokens, k_stride, head, dims, in_tile, HEAD_DIM)
        if HAS_ROTATION:
            rotation = _load_rotation(
                cos_ptr, sin_ptr, tokens, rotation_stride, dims, in_tile, HEAD_DIM
            )
            first, second = _transform(
                first, second, gains, rotation, eps, HEAD_DIM, HAS_NORM, ROUNDS
            )
        first, second = _store(
            k_cache_ptr, k_scale_ptr, slots, head, dims, first, second, in_tile,
            NUM_KV_HEADS, HEAD_DIM, HAS_SCALES,
        )  # fmt: skip
        _keep(kept_k_ptr, first, second, tokens, kept_stride, head, dims, in_tile, HEAD_DIM)
    elif head < 2 * NUM_KV_HEADS:
        head -= NUM_KV_HEADS
        wait_for_previous(DEPENDENT)
        slots = tl.load(slots_ptr + tokens, mask=in_tokens, other=-1)
        first, second = _load_heads(v_ptr, tokens, v_stride, head, dims, in_tile, HEAD_DIM)
        first, second = _store(
            v_cache_ptr, v_scale_ptr, slots, head, dims, first.to(tl.float32),
            second.to(tl.float32), in_tile, NUM_KV_HEADS, HEAD_DIM, HAS_SCALES,
        )  # fmt: skip
        _keep(kept_v_ptr, first, second, tokens, kept_stride, head, dims, in_tile, HEAD_DIM)
    elif HAS_ROTATION:
        head -= 2 * NUM_KV_HEADS
        gains = _load_gains(q_weight_ptr, dims, in_half, HEAD_DIM, HAS_NORM)
        wait_for_previous(DEPENDENT)
        first, second = _load_heads(q_ptr, tokens, q_stride, head, dims, in_tile, HEAD_DIM)
        rotation = _load_rotation(
            cos_ptr, sin_ptr, tokens, rotation_stride, dims, in_tile, HEAD_DIM
        )
        first, second = _transform(first, second, gains, rotation, eps, HEAD_DIM, HAS_NORM, ROUNDS)
        _keep(rotated_q_ptr, first, second, tokens, NUM_HEADS, head, dims, in_tile, HEAD_DIM)


def rotate_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotated_q: torch.Tensor,
    kept_k: torch.Tensor | None,
    cache: KVCacheData,
    slot_mapping: torch.Tensor,
    transform: HeadTransform | None,
    *,
    kept_v: torch.Tensor | None = None,
    rounds: bool = False,
) -> None:
    """Stores each token's key and value in its slot, and transforms queries and keys.

    Unlike the reference it rounds once, after the rotation; with `rounds` also before it, to the
    bits that rms_norm and rotary have in batch-invariant mode for 16-bit tensors. Tokens past the
    end of slot_mapping are padding, and a slot of -1 stores nothing. Each token's heads are
    contiguous in q [T, Hq, D], k and v [T, Hk, D], D even; rotated_q, contiguous, takes the
    queries. kept_k and kept_v, if any, take keys and values with the precision that the cache holds
    them in; they have the same strides. transform None leaves the queries as they are.
    """
    num_tokens = slot_mapping.shape[0]
    _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    tokens = 1 if num_tokens <= FEW_TOKENS else 16
    num_programs = 2 * num_kv_heads + (0 if transform is None else num_heads)
    # A kernel without transform does not touch these; any tensor will do.
    cos = sin = q_weight = k_weight = slot_mapping
    eps, has_norm = 0.0, False
    if transform is not None:
        cos, sin, eps = transform.cos, transform.signed_sin, transform.eps
        if transform.q_weight is not None and transform.k_weight is not None:
            q_weight, k_weight, has_norm = transform.q_weight, transform.k_weight, True
    launch = _launcher(
        num_heads, num_kv_heads, head_dim, transform is not None, has_norm, tokens,
        cache.k_scale is not None, rounds, q.device,
    )  # fmt: skip
    kept = k if kept_k is None else kept_k
    launch(
        (num_programs, -(-num_tokens // tokens), 1),
        q, k, v, rotated_q, kept_k, kept_v, *cache_tensors(cache), slot_mapping,
        cos, sin, q_weight, k_weight,
        num_tokens, *(x.stride(0) // head_dim for x in (q, k, v, kept, cos)), eps,
    )  # fmt: skip


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_rotation: bool,
    has_norm: bool,
    tokens: int,
    has_scales: bool,
    rounds: bool,
    device: torch.device,
) -> Launch:
    return Launch(
        _rotate_and_cache_kernel, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, HAS_ROTATION=has_rotation, HAS_NORM=has_norm, TOKENS=tokens,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2), HAS_SCALES=has_scales,
        ROUNDS=rounds, num_warps=1 if tokens == 1 else 4, **launch_options(device),
    )  # fmt: skip
