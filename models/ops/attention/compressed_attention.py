"""Attention to recent and compressed keys: octavo::compressed_attention_with_output.

Like models.ops.attention.attention it has no output and writes into its caller's tensor. The
reference is made of operations of torch whose shapes depend on the step's sizes alone.
"""

from dataclasses import dataclass, replace

import torch

from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.kv_cache import RowCacheData
from models.operands.entry_maker import Entries, EntryMaker
from models.operands.index_queries import IndexQueries
from models.operands.row_pages import RowPages
from models.ops.attention.compressed_entries import completed_entries, made_entries
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
    Others are fields of EntryMaker.

    Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, RowCacheData), f"layer {layer_index} caches no rows"
    num_tokens, size, table_tokens = len(metadata.slot_mapping), q.shape[-1], cache.block_tokens
    starts, positions = metadata.query_start_loc, context.context.positions[:num_tokens]
    tokens = _pages(cache, metadata.block_tables, table_tokens)
    window = min(window, metadata.max_seqlen_k)
    entries = None
    if rate:
        assert position_bias is not None, "entries have a maker"
        assert norm_weight is not None, "entries have a maker"
        assert frequencies is not None, "entries have a maker"
        entry_cache = context.kv_cache_data[entry_layer]
        assert isinstance(entry_cache, RowCacheData), f"layer {entry_layer} caches no rows"
        maker = EntryMaker(
            begin=size,
            rate=rate,
            overlaps=overlaps,
            position_bias=position_bias,
            norm_weight=norm_weight,
            eps=eps,
            frequencies=frequencies,
            table_scale=table_scale,
        )
        makers: tuple[EntryMaker, ...] = (maker,)
        index = None
        if index_q is not None:
            assert index_weights is not None, "an index weighs its heads"
            assert index_bias is not None, "an index has a maker"
            assert index_norm is not None, "an index has a maker"
            begin = size + 2 * maker.width
            of_index = replace(maker, begin=begin, position_bias=index_bias, norm_weight=index_norm)
            makers = (maker, of_index)
            index = IndexQueries(q=index_q, weights=index_weights, top_k=top_k)
        tables = context.metadata_of(entry_layer).block_tables
        entries = Entries(
            pages=_pages(entry_cache, tables, table_tokens), makers=makers, index=index
        )
    if has_kernels(q.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention.compressed import compressed_attention as kernels

        if kernels.takes(q, tokens, entries, num_tokens):
            kernels.attend(
                q, recent, output, tokens, entries, sinks, window, scale, starts, positions
            )
            return
    places = torch.arange(num_tokens, device=q.device)
    requests = torch.searchsorted(starts[1:].long(), places, right=True)
    requests = requests.clamp(max=len(starts) - 2)
    step = _Step(requests=requests, positions=positions, query_start_loc=starts)
    tokens.write(requests, positions, recent[:num_tokens], torch.ones_like(requests).bool())
    queries = _Queries(q=q, output=output, window=window, scale=scale, sinks=sinks)
    _attend(queries, step, tokens, entries)


def _pages(cache: RowCacheData, block_tables: torch.Tensor, table_tokens: int) -> RowPages:
    return RowPages(
        rows=cache.rows,
        rate=cache.rate,
        block_tokens=cache.block_tokens,
        block_tables=block_tables,
        table_tokens=table_tokens,
    )


def _attend(queries: _Queries, step: _Step, tokens: RowPages, entries: Entries | None) -> None:
    """Completes entries, and attends all queries, as many at a time as MOST_GATHERED allows."""
    q, num_keys, index_size = queries.q, queries.window, 0
    size = q.shape[-1]
    keys, index, pages = replace(tokens, rows=tokens.rows[..., :size]), None, None
    if entries is not None:
        _complete(step, tokens, entries)
        pages = replace(entries.pages, rows=entries.pages.rows[..., :size])
        index = entries.index
        num_keys += pages.num_rows if index is None else min(index.top_k, pages.num_rows)
        index_size = 0 if index is None else pages.num_rows * index.q.shape[-1]
    each = max(1, MOST_GATHERED // (num_keys * size + index_size))
    for first in range(0, len(step.positions), each):
        some = slice(first, min(first + each, len(step.positions)))
        requests, positions = step.requests[some].unsqueeze(1), step.positions[some]
        numbers = positions.unsqueeze(1) - torch.arange(queries.window, device=q.device)
        seen, gathered = numbers >= 0, keys.of(requests, numbers)
        if entries is not None and pages is not None:
            num_seen = (positions + 1).div(pages.rate, rounding_mode="floor")
            if index is not None:
                index_keys = replace(pages, rows=entries.pages.rows[..., size:])
                numbers = _chosen(index.of(some), index_keys, requests, num_seen)
            else:
                numbers = torch.arange(pages.num_rows, device=q.device).expand(len(positions), -1)
            seen = torch.cat((seen, numbers < num_seen.unsqueeze(1)), dim=1)
            gathered = torch.cat((gathered, pages.of(requests, numbers)), dim=1)
        queries.output[some] = queries.attended(some, gathered, seen)


def _complete(step: _Step, tokens: RowPages, entries: Entries) -> None:
    """Makes and stores the entries that a step completes."""
    pages = entries.pages
    owners, numbers, are = completed_entries(step.query_start_loc, step.positions, pages.rate)
    rows = [made_entries(maker, tokens, owners, numbers) for maker in entries.makers]
    pages.write(owners, numbers, torch.cat(rows, dim=-1), are)


def _chosen(
    index: IndexQueries, keys: RowPages, requests: torch.Tensor, num_seen: torch.Tensor
) -> torch.Tensor:
    """Returns the numbers of entries for t tokens, [t, k]; from num_seen, [t], on unseen."""
    numbers = torch.arange(keys.num_rows, device=num_seen.device)
    scores = torch.matmul(index.q.float(), keys.of(requests, numbers).float().transpose(-1, -2))
    scores = (scores.relu() * index.weights.unsqueeze(-1)).sum(1)
    scores = scores.masked_fill(numbers >= num_seen.unsqueeze(1), -torch.inf)
    return scores.topk(min(index.top_k, len(numbers)), dim=-1).indices
