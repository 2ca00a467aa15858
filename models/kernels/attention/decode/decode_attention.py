"""Paged attention of single-token queries; several programs share the keys of a sequence."""

from functools import lru_cache

import torch
import triton

from models.forward_context import AttentionMetadata
from models.kernels.attention.cache.cache_tensors import cache_tensors
from models.kernels.attention.configurations import (
    EARLY_REQUESTS,
    decode_tiles,
    least_part,
    num_dealt,
    num_splits,
)
from models.kernels.attention.decode.decode_kernel import (
    DecodeForm,
    New,
    decode_kernel,
)
from models.kernels.attention.decode.prefix_attention import (
    NewTokens,
    SharedPrefixes,
    prefix_attention,
)
from models.kernels.attention.decode.prefix_parts import PrefixParts
from models.kernels.attention.key_parts import Parts
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.kernels.tuning.tiles import AttentionTiles
from models.kv_cache import KVCacheData
from models.operands.base_two import LOG2_E

_MOST_AT_ONCE = 8
_AT_ONCE_PER_WARP = 2048
"""Most partial results that are read together, and the elements of them that a warp holds: twice as
many cost the loop over keys of one warp registers."""
_MOST_GATHERED = 4
"""Most rows of heads for each warp whose loads are all waited for together: registers."""


def decode_attention(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    new: NewTokens | None = None,
    *,
    output_scale: torch.Tensor | None = None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> SharedPrefixes | None:
    """Attends each single-token request's query to all its keys; skips other requests.

    The keys that a plan says are shared are attended to by prefix_attention, before the others.
    With a workspace several programs share a sequence's keys; the last one to finish adds the
    partial results up in a fixed order. In steps of single tokens of several requests, parts may
    be as long as the lengths of all sequences say: num_dealt. The grid depends on R, Hq, Hk and the
    workspace only and the host reads nothing, so a launch may be captured.
    T tokens, R requests, Hq/Hk query/kv heads, D head dim.

    q: [T, Hq, D]. Without `new` contiguous, possibly `output` itself; with it not yet transformed,
        each token's heads contiguous, separate from `output`.
    output: [T, Hq, D], contiguous; a request without tokens gets zeros.
    output_scale: with an FP8 output [T, Hq * D] its scales, of rounded_parts; D is 128.
    new: keys and values to transform and store, if every request has one token; None: the cache
        holds them already.
    sliding_window: most keys that a query sees.
    sinks: [Hq], scores without keys.
    scale: factor of the scores.
    soft_cap: of scaled scores; 0 for none.

    Returns:
        The results of prefix_attention, also of requests with several queries.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    workspace = metadata.workspace
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    tiles = decode_tiles(
        q.dtype, cache.k.dtype, block_d, num_requests=None if new is None else num_requests,
        num_heads=num_heads, num_kv_heads=num_kv_heads, window=sliding_window or 0,
        device=q.device,
    )  # fmt: skip
    is_early = num_requests <= EARLY_REQUESTS or not tiles.starts_next_late
    starts_next_late = new is None or not is_early
    splits = num_splits(
        workspace, num_requests, num_heads, num_kv_heads, cache.k.dtype, tiles,
        beside_chunks=metadata.max_seqlen_q > 1,
    )  # fmt: skip
    dealt = num_dealt(
        workspace, None if new is None else num_requests, num_kv_heads, tiles,
        window=sliding_window or 0,
    )  # fmt: skip
    # Without splits the kernel touches none of these three.
    parts = (
        Parts(output, output, metadata.seq_lens)
        if workspace is None
        else Parts(workspace.partials, workspace.lse, workspace.counters)
    )
    prefix = None
    if metadata.prefix_plan is not None and sliding_window is None:
        prefix = prefix_attention(q, cache, metadata, new, scale=scale, soft_cap=soft_cap)
    # Without new tokens the kernel touches none of these.
    k = v = slots = cos = sin = q_weight = k_weight = metadata.seq_lens
    eps, has_norm = 0.0, False
    if new is not None:
        k, v, slots = new.k, new.v, new.slot_mapping
        cos, sin, eps = new.transform.cos, new.transform.signed_sin, new.transform.eps
        if new.transform.q_weight is not None and new.transform.k_weight is not None:
            q_weight, k_weight, has_norm = new.transform.q_weight, new.transform.k_weight, True
    launch = _launcher(
        num_heads, num_kv_heads, head_dim, cache.k.shape[1], tiles, metadata.max_seqlen_q == 1,
        new is not None, has_norm, sliding_window or 0, sinks is not None,
        cache.k_scale is not None, starts_next_late, new is None or splits > 1 or dealt > 0, dealt,
        soft_cap, 0 if prefix is None else prefix.num_programs, q.device,
    )  # fmt: skip
    # Without shared prefixes the kernel touches only the first of these, as lengths.
    own_lens = tile_slots = prefix_tiles = metadata.seq_lens
    prefix_parts = PrefixParts(output, output)
    if prefix is not None:
        own_lens, tile_slots, prefix_tiles = (
            prefix.plan.own_lens,
            prefix.plan.tile_slots,
            prefix.plan.tiles,
        )
        prefix_parts = prefix.parts
    launch(
        (num_kv_heads, dealt + num_requests, 1 if dealt > 0 else splits),
        q, cache_tensors(cache), output, output_scale,
        metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
        own_lens, tile_slots, prefix_tiles, prefix_parts, parts,
        New(k, v, cos, sin, q_weight, k_weight), slots,
        metadata.seq_lens if sinks is None else sinks,
        metadata.block_tables.stride(0), splits,
        0 if output_scale is None else output_scale.stride(1),
        *(x.stride(0) // head_dim for x in (q, k, v, cos)),
        scale * LOG2_E, eps,
    )  # fmt: skip
    return prefix


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tiles: AttentionTiles,
    only_single_tokens: bool,
    has_new: bool,
    has_norm: bool,
    window: int,
    has_sinks: bool,
    has_scales: bool,
    starts_next_late: bool,
    is_split: bool,
    dealt: int,
    soft_cap: float,
    prefix_programs: int,
    device: torch.device,
) -> Launch:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    reads_words = has_scales and head_dim % 4 == 0 and block_d >= 64
    # Tensor cores take rows by 16; keys_of_8_bits makes columns of them, which they take by 8.
    rows = max(tiles.rows if reads_words else 16, padded_group)
    # With two rows per warp, a sum over a head stays within its warp.
    head_rows = max(padded_group, min(rows, 2 * tiles.num_warps))
    # Without words the first keys would be held without their scales.
    held_keys = tiles.held_keys if reads_words or not has_scales else 0
    most_elements = _AT_ONCE_PER_WARP * tiles.num_warps
    form = DecodeForm(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        window=window, soft_cap=soft_cap, has_sinks=has_sinks, has_scales=has_scales,
        only_single_tokens=only_single_tokens, has_new=has_new, has_norm=has_norm,
        rows=rows, head_rows=head_rows, padded_group=padded_group, block_d=block_d,
        keys=tiles.keys, held_keys=held_keys, stages=tiles.num_stages,
        least_part=least_part(tiles), num_programs=tiles.num_programs,
        starts_next_late=starts_next_late, dealt=dealt, even_parts=tiles.even_parts,
        is_split=is_split,
        at_once=max(1, min(_MOST_AT_ONCE, most_elements // (padded_group * block_d))),
        reads_words=reads_words,
        gathers=device.type == "cuda" and head_rows <= _MOST_GATHERED * tiles.num_warps,
        prefix_programs=prefix_programs,
        has_assembly=device.type == "cuda",
    )  # fmt: skip
    return Launch(
        decode_kernel, form=form, num_warps=tiles.num_warps, maxnreg=tiles.registers,
        **launch_options(device),
    )  # fmt: skip
