"""Reads blocks of cached latent vectors in the model's dtype."""

import torch
import triton
import triton.language as tl

from models.kv_cache import LatentCacheData

_ROWS = 16
"""Tokens of a program."""


@triton.jit(do_not_specialize=["blocks_ptr", "num_tokens"])
def _read_kernel(
    latent_ptr, scale_ptr, rotated_ptr, blocks_ptr, latents_ptr, shared_ptr, num_tokens,
    LATENT: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Copies ROWS tokens' entries; without scale_ptr latent vectors are not FP8."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    block = tl.load(blocks_ptr + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + tokens % BLOCK_SIZE
    columns = tl.arange(0, BLOCK_C)[None, :]
    in_latents = is_token[:, None] & (columns < LATENT)
    latent = tl.load(latent_ptr + slots[:, None] * LATENT + columns, mask=in_latents, other=0.0)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + slots, mask=is_token, other=0.0)
        latent = latent.to(tl.float32) * scale[:, None]
    latent = latent.to(latents_ptr.dtype.element_ty)
    tl.store(latents_ptr + tokens[:, None] * LATENT + columns, latent, mask=in_latents)
    dims = tl.arange(0, BLOCK_P)[None, :]
    in_shared = is_token[:, None] & (dims < ROTATED)
    shared = tl.load(rotated_ptr + slots[:, None] * ROTATED + dims, mask=in_shared, other=0.0)
    shared = shared.to(shared_ptr.dtype.element_ty)
    tl.store(shared_ptr + tokens[:, None] * ROTATED + dims, shared, mask=in_shared)


def read_latents(
    cache: LatentCacheData, block_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latent vectors [n * B, C] and rotated elements [n * B, P] of n blocks, in `dtype`.

    block_ids: [n] int32, contiguous.
    """
    _, block_size, latent_dim = cache.latent.shape
    rope_dim = cache.rotated.shape[2]
    num_tokens = len(block_ids) * block_size
    latents = torch.empty(num_tokens, latent_dim, dtype=dtype, device=block_ids.device)
    shared = torch.empty(num_tokens, rope_dim, dtype=dtype, device=block_ids.device)
    _read_kernel[(triton.cdiv(num_tokens, _ROWS),)](
        cache.latent, cache.latent_scale, cache.rotated, block_ids, latents, shared, num_tokens,
        LATENT=latent_dim, ROTATED=rope_dim, BLOCK_SIZE=block_size, ROWS=_ROWS,
        BLOCK_C=triton.next_power_of_2(latent_dim), BLOCK_P=triton.next_power_of_2(rope_dim),
        num_warps=4,
    )  # fmt: skip
    return latents, shared
