"""Attention to recent and compressed keys: octavo::compressed_attention_with_output.

Like models.ops.attention.attention it has no output and writes into its caller's tensor. It is the
same on all devices: operations of torch whose shapes depend on the step's sizes alone, so a graph
may hold it.
"""

from dataclasses import dataclass, replace

import torch

from models.forward_context import get_forward_context
from models.kv_cache import RowCacheData
from models.operands.row_pages import RowPages
from models.ops.attention.compressed_entries import Compressor, completed_entries
from models.ops.custom_op import operator

MOST_GATHERED = 2**26
"""Most elements of keys that a call gathers at once: 128 MiB in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """T query tokens: request and position of each, [T], and where requests start, [R + 1]."""

    requests: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queries:
    """Queries and what they attend with; fields are arguments of the operator."""

    q: torch.Tensor
    output: torch.Tensor
    window: int
    scale: float
    sinks: torch.Tensor

    def attended(self, tokens: slice, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attends some tokens, each to its keys, [t, K, D], where `seen`, [t, K], is true."""
        scores = torch.matmul(self.q[tokens], keys.transpose(1, 2)).float() * self.scale
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        sinks = self.sinks.float().view(1, -1, 1).expand(len(scores), -1, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        return torch.matmul(weights.to(keys.dtype), keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Queries [T, J, D] and weights [T, J] of an index, its cached keys, and how many it takes."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: RowPages
    top_k: int

    def chosen(self, step: _Step, tokens: slice, num_seen: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of entries for some tokens, [t, k]; from num_seen, [t], on unseen."""
        numbers = torch.arange(self.keys.num_rows, device=num_seen.device)
        keys = self.keys.of(step.requests[tokens].unsqueeze(1), numbers).float()
        scores = torch.matmul(self.q[tokens].float(), keys.transpose(-1, -2)).relu()
        scores = (scores * self.weights[tokens].unsqueeze(-1)).sum(1)
        scores = scores.masked_fill(numbers >= num_seen.unsqueeze(1), -torch.inf)
        return scores.topk(min(self.top_k, len(numbers)), dim=-1).indices


@operator(mutates=("output",))
def compressed_attention_with_output(  # noqa: PLR0913  # an operator takes no dataclasses
    q: torch.Tensor,
    recent: torch.Tensor,
    output: torch.Tensor,
    layer_index: int,
    window: int,
    scale: float,
    sinks: torch.Tensor,
    entry_layer: int,
    rate: int,
    overlaps: bool,
    position_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    frequencies: torch.Tensor | None,
    table_scale: float,
    index_q: torch.Tensor | None,
    index_weights: torch.Tensor | None,
    index_bias: torch.Tensor | None,
    index_norm: torch.Tensor | None,
    top_k: int,
) -> None:
    """Stores the step's keys, completes entries, then attends each query to both kinds.

    Keys are values, too. A query sees the last `window` keys of tokens, its own included, and those
    entries whose tokens all come up to its own; of these the top_k of the highest score if there is
    an index: the sum over the index's heads of weight * relu(query * key). Tokens past the end of
    slot_mapping are padding: their output is undefined.
    T tokens, H heads of D elements, J heads of size I of the index.

    q: [T, H, D]. output: [T, H, D], overwritten.
    recent: [T, E], cached for each token: a key of D elements, then the values and the gates of an
        entry, then those of the index's entry.
    layer_index, entry_layer: of the caches of both kinds; -1 and rate 0: there are no entries.
    sinks: [H], a score of each head without a key.
    index_q: [T, J, I]. index_weights: [T, J] float32. None without an index.
    index_bias, index_norm: as position_bias and norm_weight, of the index's entries.
    Others are fields of Compressor.

    Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, RowCacheData), f"layer {layer_index} caches no rows"
    num_tokens, size = len(metadata.slot_mapping), q.shape[-1]
    starts, positions = metadata.query_start_loc, context.context.positions[:num_tokens]
    places = torch.arange(num_tokens, device=q.device)
    requests = torch.searchsorted(starts[1:].long(), places, right=True)
    requests = requests.clamp(max=len(starts) - 2)
    step = _Step(requests=requests, positions=positions, query_start_loc=starts)
    table_tokens = cache.block_tokens
    tokens = _pages(cache, metadata.block_tables, table_tokens)
    tokens.write(requests, positions, recent[:num_tokens], torch.ones_like(requests).bool())
    keys = replace(tokens, rows=tokens.rows[..., :size])
    window = min(window, metadata.max_seqlen_k)
    queries = _Queries(q=q, output=output, window=window, scale=scale, sinks=sinks)
    if not rate:
        _attend(queries, step, keys, None, None)
        return
    assert position_bias is not None, "entries have a compressor"
    assert norm_weight is not None, "entries have a compressor"
    assert frequencies is not None, "entries have a compressor"
    entry_cache = context.kv_cache_data[entry_layer]
    assert isinstance(entry_cache, RowCacheData), f"layer {entry_layer} caches no rows"
    entries = _pages(entry_cache, context.metadata_of(entry_layer).block_tables, table_tokens)
    compressor = Compressor(
        rate=rate,
        overlaps=overlaps,
        position_bias=position_bias,
        norm_weight=norm_weight,
        eps=eps,
        frequencies=frequencies,
        table_scale=table_scale,
    )
    owners, numbers, are = completed_entries(starts, positions, rate)
    end = size + 2 * position_bias.shape[1]
    raw = replace(tokens, rows=tokens.rows[..., size:end])
    rows = compressor.entries(raw, owners, numbers)
    index = None
    if index_q is not None:
        assert index_weights is not None, "an index weighs its heads"
        assert index_bias is not None, "an index has a compressor"
        assert index_norm is not None, "an index has a compressor"
        compressor = replace(compressor, position_bias=index_bias, norm_weight=index_norm)
        raw = replace(tokens, rows=tokens.rows[..., end:])
        rows = torch.cat((rows, compressor.entries(raw, owners, numbers)), dim=-1)
        index_keys = replace(entries, rows=entries.rows[..., size:])
        index = _Index(q=index_q, weights=index_weights, keys=index_keys, top_k=top_k)
    entries.write(owners, numbers, rows, are)
    entries = replace(entries, rows=entries.rows[..., :size])
    _attend(queries, step, keys, entries, index)


def _pages(cache: RowCacheData, block_tables: torch.Tensor, table_tokens: int) -> RowPages:
    return RowPages(
        rows=cache.rows,
        rate=cache.rate,
        block_tokens=cache.block_tokens,
        block_tables=block_tables,
        table_tokens=table_tokens,
    )


def _attend(
    queries: _Queries,
    step: _Step,
    keys: RowPages,
    entries: RowPages | None,
    index: _Index | None,
) -> None:
    """Attends all queries, as many at a time as MOST_GATHERED allows."""
    q, num_keys, index_size = queries.q, queries.window, 0
    if index is not None:
        num_keys += min(index.top_k, index.keys.num_rows)
        index_size = index.keys.num_rows * index.q.shape[-1]
    elif entries is not None:
        num_keys += entries.num_rows
    each = max(1, MOST_GATHERED // (num_keys * q.shape[-1] + index_size))
    for first in range(0, len(step.positions), each):
        tokens = slice(first, min(first + each, len(step.positions)))
        requests, positions = step.requests[tokens].unsqueeze(1), step.positions[tokens]
        numbers = positions.unsqueeze(1) - torch.arange(queries.window, device=q.device)
        seen, gathered = numbers >= 0, keys.of(requests, numbers)
        if entries is not None:
            num_seen = (positions + 1).div(entries.rate, rounding_mode="floor")
            if index is not None:
                numbers = index.chosen(step, tokens, num_seen)
            else:
                numbers = torch.arange(entries.num_rows, device=q.device).expand(len(positions), -1)
            seen = torch.cat((seen, numbers < num_seen.unsqueeze(1)), dim=1)
            gathered = torch.cat((gathered, entries.of(requests, numbers)), dim=1)
        queries.output[tokens] = queries.attended(tokens, gathered, seen)
