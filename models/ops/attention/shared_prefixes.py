"""The reference of attention to keys that several requests share, in parts for each request."""

import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import TILE_QUERIES, AttentionMetadata, PrefixPlan, get_forward_context
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
    q_lens = metadata.query_start_loc.diff()
    attended = torch.cat((output, torch.zeros_like(output[:1])))
    for query in range(plan.num_queries):
        is_query = is_sharing & (query < q_lens)
        tokens = metadata.query_start_loc[:-1].long() + query
        seq_lens = metadata.seq_lens - (q_lens - 1 - query)
        queries = q.index_select(0, tokens.clamp(max=len(q) - 1))
        tables, are_parts = _parts(plan, query, metadata.block_tables, cache.k.shape[1])
        scores, values = _scores_and_values(
            queries, cache, tables, seq_lens, scale=scale, soft_cap=soft_cap
        )
        own_part = ~torch.stack(are_parts).any(0)
        parts = [_attend_part(scores, values, each, None) for each in are_parts]
        parts.append(_attend_part(scores, values, own_part, sinks))
        shares = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
        sums = sum(share * each for share, (each, _) in zip(shares, parts, strict=True))
        # Other requests write to one more row.
        rows = tokens.where(is_query, len(output))
        attended.index_copy_(0, rows, sums.to(output.dtype).view(queries.shape))
    output.copy_(attended[:-1])


def _parts(
    plan: PrefixPlan, query: int, block_tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns where one query of each request reads keys, by its number in the request.

    That is a block table, in which a prefix has the blocks of the request that its tile names, and
    the keys of each of the request's prefixes, [R, L] bool.
    """
    tables = block_tables
    keys = torch.arange(tables.shape[1] * block_size, device=tables.device)
    are_parts = []
    for slots in plan.tile_slots[:, :-1].T:
        tiles = (slots.clamp(min=0).long() + query) // TILE_QUERIES
        tiles = tiles.clamp(max=plan.tiles.shape[1] - 1)
        first, num_keys, leaders = plan.tiles[2:].index_select(1, tiles)[..., None]
        is_part = (keys >= first) & (keys < first + num_keys) & (slots >= 0)[:, None]
        are_parts.append(is_part)
        of_leader = block_tables.index_select(0, leaders.flatten().long())
        tables = of_leader.where(is_part[:, ::block_size], tables)
    return tables, are_parts


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
