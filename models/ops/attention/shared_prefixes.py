"""The reference of attention to keys that several requests share, in parts for each request."""

import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import TILE_REQUESTS, AttentionMetadata, get_forward_context
from models.kv_cache import KVCacheData
from models.ops.attention.kv_cache import read_kv_cache


def attend_shared(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Attends the requests of a plan of shared prefixes as the plan says.

    Each reads its prefixes from the blocks of the first request of their tiles, and its other keys
    from its own. Queries with a window read few keys and share none.

    q, output: [T, Hq, D]; arguments are as in unified_attention_with_output.
    """
    plan = metadata.prefix_plan
    if plan is None or sliding_window is not None:
        return
    is_sharing = plan.tile_slots[:, 0] >= 0
    # A recorded pass repeats its operations, whatever its next plan is.
    is_recorded = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
    if not is_recorded and not is_sharing.any():
        return
    starts = metadata.query_start_loc[:-1].long()
    queries = q.index_select(0, starts.clamp(max=len(q) - 1))
    tables = own = metadata.block_tables
    keys = torch.arange(own.shape[1] * cache.k.shape[1], device=own.device)
    are_parts = []
    for slots in plan.tile_slots[:, :-1].T:
        tiles = slots.clamp(min=0).long() // TILE_REQUESTS
        first, num_keys = (plan.tiles[row].index_select(0, tiles)[:, None] for row in (2, 3))
        is_part = (keys >= first) & (keys < first + num_keys) & (slots >= 0)[:, None]
        are_parts.append(is_part)
        # Each block is read from one table: those of the prefix from the leader's.
        leaders = plan.requests.index_select(0, plan.tiles[0].index_select(0, tiles).long())
        of_leader = own.index_select(0, leaders.long())
        tables = of_leader.where(is_part[:, :: cache.k.shape[1]], tables)
    scores, values = _scores_and_values(
        queries, cache, tables, metadata.seq_lens, scale=scale, soft_cap=soft_cap
    )
    own_part = ~torch.stack(are_parts).any(0)
    parts = [_attend_part(scores, values, each, None) for each in are_parts]
    parts.append(_attend_part(scores, values, own_part, sinks))
    shares = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    attended = sum(share * each for share, (each, _) in zip(shares, parts, strict=True))
    # Other requests write to one more row.
    rows = starts.where(is_sharing, len(output))
    with_one_more = torch.cat((output, torch.zeros_like(output[:1])))
    with_one_more.index_copy_(0, rows, attended.to(output.dtype).view(queries.shape))
    output.copy_(with_one_more[:-1])


def _scores_and_values(
    queries: torch.Tensor,
    cache: KVCacheData,
    tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scores of one query of each request, and its values, by kv head.

    Maps queries [R, Hq, D] and tables [R, L / B] to [R, Hk, Hq / Hk, L], minus infinity where a
    sequence has no key, and [R, Hk, L, D], zero there.
    """
    num_requests, _, head_dim = queries.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys, values = (
        blocks.reshape(num_requests, -1, *blocks.shape[-2:]).transpose(1, 2)
        for blocks in read_kv_cache(cache, tables.reshape(-1), dtype)
    )
    is_key = torch.arange(keys.shape[2], device=keys.device) < seq_lens[:, None]
    by_group = queries.to(dtype).view(num_requests, keys.shape[1], -1, head_dim)
    scores = by_group @ keys.transpose(2, 3) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~is_key[:, None, None], -torch.inf)
    return scores, values.where(is_key[:, None, :, None], 0.0)


def _attend_part(
    scores: torch.Tensor, values: torch.Tensor, is_part: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to the keys of a part, [R, L] bool, of what _scores_and_values returns.

    Returns outputs [R, Hk, Hq / Hk, D] and logarithms of the sums of exponentials, minus infinity
    of a request without a key in the part, whose output is finite.
    """
    scores = scores.masked_fill(~is_part[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, scores.shape[1], -1))
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)
    return (scores - finite.unsqueeze(-1)).exp() @ values, lse
