"""Norm, rotations, rounding and the write to the cache of latent attention, in one kernel."""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.kernels.attention.cache.cache_scales import exact_scale_of
from models.kernels.attention.latent.index_rounding import round_index_queries, store_index_key
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kv_cache import FP8_CACHE_DTYPE, LatentCacheData
from models.operands.index_queries import IndexQueries
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.operands.latent_queries import LatentQueries

_HEADS = 16
"""Query heads of a program."""


@triton.jit
def _rotated(
    x_ptr, cos_ptr, sin_ptr, at_x, at_rotation, in_tile, HALF: tl.constexpr, ROTATES: tl.constexpr
):
    """Returns both halves of heads, rotated as elementwise.rotary does if ROTATES."""
    first = tl.load(x_ptr + at_x, mask=in_tile, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at_x + HALF, mask=in_tile, other=0.0).to(tl.float32)
    if ROTATES:
        cos = tl.load(cos_ptr + at_rotation, mask=in_tile, other=0.0).to(tl.float32)
        # The table's first half carries the minus sign of the first half's sine.
        sin = tl.load(sin_ptr + at_rotation + HALF, mask=in_tile, other=0.0).to(tl.float32)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    return first, second


@triton.jit
def _store_entry(
    token, slot, latent_ptr, k_ptr, weight_ptr, cos_ptr, sin_ptr, latent_cache_ptr,
    scale_ptr, rotated_cache_ptr, rotation_stride, eps,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr,
    HAS_TRANSFORM: tl.constexpr,
):  # fmt: skip
    """Stores a token's latent vector and rotated elements in its slot.

    Without scale_ptr the latent vector is not rounded to FP8.
    """
    columns = tl.arange(0, BLOCK_C)
    is_column = columns < LATENT
    x = tl.load(latent_ptr + token * LATENT_STRIDE + columns, mask=is_column, other=0.0)
    if HAS_TRANSFORM:
        # In the order in which elementwise.rms_norm adds up, so that bits are equal.
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        exact = x.to(tl.float32)
        mean = tl.sum(exact * exact, 0) / LATENT
        x = (exact * tl.rsqrt(mean + eps) * weight).to(x.dtype)
    HALF: tl.constexpr = ROTATED // 2
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HALF
    first, second = _rotated(
        k_ptr, cos_ptr, sin_ptr, token * K_STRIDE + dims, token * rotation_stride + dims, in_half,
        HALF, HAS_TRANSFORM,
    )  # fmt: skip
    if scale_ptr is not None:
        # Divided exactly: quotients between two FP8 values round as quantize_heads rounds them.
        exact = x.to(tl.float32)
        scale = exact_scale_of(tl.max(tl.abs(exact), 0))
        tl.store(scale_ptr + slot, scale)
        x = tl.div_rn(exact, tl.zeros([BLOCK_C], tl.float32) + scale)
        x = x.to(latent_cache_ptr.dtype.element_ty)
    dtype = rotated_cache_ptr.dtype.element_ty
    tl.store(latent_cache_ptr + slot * LATENT + columns, x, mask=is_column)
    rotated_ptrs = rotated_cache_ptr + slot * ROTATED + dims
    tl.store(rotated_ptrs, first.to(dtype), mask=in_half)
    tl.store(rotated_ptrs + HALF, second.to(dtype), mask=in_half)


@triton.jit
def _rotate_queries(
    token, tile, q_ptr, cos_ptr, sin_ptr, rotated_q_ptr, rotation_stride,
    NUM_HEADS: tl.constexpr, ROTATED: tl.constexpr, Q_STRIDE: tl.constexpr, Q_STEP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotates the rotated elements of HEADS of a token's queries."""
    HALF: tl.constexpr = ROTATED // 2
    heads = (tile * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    in_tile = (heads < NUM_HEADS) & (dims < HALF)
    first, second = _rotated(
        q_ptr, cos_ptr, sin_ptr, token * Q_STRIDE + heads * Q_STEP + dims,
        token * rotation_stride + dims, in_tile, HALF, True,
    )  # fmt: skip
    rotated_ptrs = rotated_q_ptr + (token * NUM_HEADS + heads) * ROTATED + dims
    dtype = rotated_q_ptr.dtype.element_ty
    tl.store(rotated_ptrs, first.to(dtype), mask=in_tile)
    tl.store(rotated_ptrs + HALF, second.to(dtype), mask=in_tile)


# Specialising on what varies from step to step would compile again while serving.
@triton.jit(do_not_specialize=["slots_ptr", "rotation_stride"])
def _latent_cache_kernel(
    latent_ptr, k_ptr, index_k_ptr, q_ptr, index_q_ptr, index_weights_ptr, weight_ptr, cos_ptr,
    sin_ptr, slots_ptr, latent_cache_ptr, scale_ptr, rotated_cache_ptr, index_cache_ptr,
    index_scale_ptr, rotated_q_ptr, rounded_q_ptr, rounded_weights_ptr, rotation_stride, eps,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    INDEX_HEADS: tl.constexpr, INDEX: tl.constexpr, LATENT_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, Q_STEP: tl.constexpr,
    HAS_TRANSFORM: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Stores one token's entry, or its key of the index, or does HEADS of its queries.

    It rotates queries if HAS_TRANSFORM, and rounds those of the index if there are INDEX_HEADS.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    job = tl.program_id(1)
    NUM_STORES: tl.constexpr = 2 if INDEX > 0 else 1
    NUM_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS if HAS_TRANSFORM else 0
    # A token of a dummy request may have no slot, -1.
    if (job == 0) & (slot >= 0):
        _store_entry(
            token, slot, latent_ptr, k_ptr, weight_ptr, cos_ptr, sin_ptr, latent_cache_ptr,
            scale_ptr, rotated_cache_ptr, rotation_stride, eps, LATENT, ROTATED, LATENT_STRIDE,
            K_STRIDE, BLOCK_C, BLOCK_HALF, HAS_TRANSFORM,
        )  # fmt: skip
    if INDEX > 0:  # noqa: SIM102  # a constant leaves the rest out, `and` would not
        if (job == 1) & (slot >= 0):
            store_index_key(
                token, slot, index_k_ptr, index_cache_ptr, index_scale_ptr, INDEX, BLOCK_D
            )
    if HAS_TRANSFORM:  # noqa: SIM102  # as above
        if (job >= NUM_STORES) & (job < NUM_STORES + NUM_TILES):
            _rotate_queries(
                token, job - NUM_STORES, q_ptr, cos_ptr, sin_ptr, rotated_q_ptr, rotation_stride,
                NUM_HEADS, ROTATED, Q_STRIDE, Q_STEP, HEADS, BLOCK_HALF,
            )  # fmt: skip
    if INDEX_HEADS > 0:  # noqa: SIM102  # as above
        if job >= NUM_STORES + NUM_TILES:
            round_index_queries(
                token, job - NUM_STORES - NUM_TILES, index_q_ptr, index_weights_ptr, rounded_q_ptr,
                rounded_weights_ptr, INDEX_HEADS, INDEX, HEADS, BLOCK_D,
            )  # fmt: skip


def cache_latents(
    queries: LatentQueries,
    index: IndexQueries | None,
    entries: LatentEntries,
    transform: LatentTransform | None,
    cache: LatentCacheData,
    slot_mapping: torch.Tensor,
) -> tuple[LatentQueries, IndexQueries | None]:
    """Stores each token's entry in its slot; returns the queries, rotated if there is a transform.

    Of a cache with scales the entry, and the queries of the index, are rounded to FP8. Results have
    the bits of separate operators: rms_norm, rotary, and the references' rounding; only norms in
    float32 before FP8 are added up in another order. Tokens past the end of slot_mapping are
    padding, and a slot of -1 stores nothing. Each token's elements of an entry are contiguous, and
    each head's of queries.
    """
    num_heads, sizes = queries.plain.shape[1], queries.sizes
    q, index_keys = queries.rotated, entries.index_keys
    num_programs = 1 if index_keys is None else 2
    rotated_q = q
    weight = cos = sin = slot_mapping  # without transform a kernel does not touch these
    eps = 0.0
    if transform is not None:
        rotated_q = q.new_empty(q.shape)
        num_programs += triton.cdiv(num_heads, _HEADS)
        weight, eps = transform.weight, transform.eps
        cos, sin = transform.cos, transform.signed_sin
        assert cos.stride(0) == sin.stride(0), "both are parts of one table"
    index_heads, given, rounded = 0, None, None
    if index is not None and cache.index_scale is not None:
        index_heads, given = index.q.shape[1], index
        num_programs += triton.cdiv(index_heads, _HEADS)
        rounded_q = torch.empty_like(index.q, dtype=FP8_CACHE_DTYPE)
        rounded = replace(index, q=rounded_q, weights=torch.empty_like(index.weights))
    launch = _launcher(
        num_heads, sizes.latent, sizes.rotated, index_heads,
        0 if index_keys is None else index_keys.shape[1], entries.latent.stride(0),
        entries.rotated.stride(0), q.stride(0), q.stride(1), transform is not None, q.device,
    )  # fmt: skip
    launch(
        (len(slot_mapping), num_programs, 1),
        entries.latent, entries.rotated, index_keys, q, *_tensors(given), weight, cos, sin,
        slot_mapping, cache.latent, cache.latent_scale, cache.rotated, cache.index_keys,
        cache.index_scale, rotated_q, *_tensors(rounded), cos.stride(0), eps,
    )  # fmt: skip
    return replace(queries, rotated=rotated_q), index if rounded is None else rounded


def _tensors(index: IndexQueries | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if index is None else (index.q, index.weights)


@lru_cache
def _launcher(
    num_heads: int,
    latent: int,
    rotated: int,
    index_heads: int,
    index: int,
    latent_stride: int,
    k_stride: int,
    q_stride: int,
    q_step: int,
    has_transform: bool,
    device: torch.device,
) -> Launch:
    block = triton.next_power_of_2(latent)
    return Launch(
        _latent_cache_kernel, NUM_HEADS=num_heads, LATENT=latent, ROTATED=rotated,
        INDEX_HEADS=index_heads, INDEX=index, LATENT_STRIDE=latent_stride, K_STRIDE=k_stride,
        Q_STRIDE=q_stride, Q_STEP=q_step, HAS_TRANSFORM=has_transform, HEADS=_HEADS,
        BLOCK_C=block, BLOCK_HALF=triton.next_power_of_2(rotated // 2),
        BLOCK_D=triton.next_power_of_2(max(1, index)),
        # As many as elementwise.rms_norm has, whose sums are in the same order.
        num_warps=min(16, max(1, block // 256)), **launch_options(device),
    )  # fmt: skip
