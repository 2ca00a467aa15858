"""Latent attention of one layer on a GPU: chooses the form of each request."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from models.forward_context import AttentionMetadata, IndexChoice, PromptChunk
from models.kernels.attention.latent.expanded_attention import expanded_attention, takes
from models.kernels.attention.latent.index_choice import choose_keys
from models.kernels.attention.latent.latent_attention import latent_attention
from models.kernels.attention.latent.latent_cache import cache_latents
from models.kernels.attention.latent.latent_forms import least_expanded_queries
from models.kv_cache import LatentCacheData
from models.operands.index_queries import IndexQueries
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.operands.latent_queries import LatentQueries


def attend(
    queries: LatentQueries,
    entries: LatentEntries,
    transform: LatentTransform | None,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    scale: float,
    index: IndexQueries | None,
    choice: IndexChoice | None,
    sinks: torch.Tensor | None = None,
    *,
    is_prefill: bool,
) -> None:
    """Runs models.ops.attention.latent_attention.latent_attention_with_output on a GPU.

    choice: of the tokens that queries attend to, made here with an index; None: of all, and without
        sinks.

    Long chunks of prompts take the expanded form, one after the other, and the requests between
    them the absorbed one. The host knows the chunks of steps outside whole graphs alone, so these
    hold the absorbed form. Queries that choose their keys take it, too.
    """
    queries, index = cache_latents(queries, index, entries, transform, cache, metadata.slot_mapping)
    positions = None
    if choice is not None:
        if index is not None:
            choice.positions = choose_keys(index, cache, metadata)
        positions = choice.positions
    chunks: Sequence[PromptChunk] = ()
    if metadata.chunks and choice is None and takes(queries.sizes, output.itemsize):
        least = least_expanded_queries(queries.sizes)
        chunks = [chunk for chunk in metadata.chunks if chunk.num_queries >= least]
    if not chunks:
        _absorbed(queries, cache, metadata, output, scale, positions, sinks, is_prefill=is_prefill)
        return
    for tokens, others in _between(metadata, chunks):
        _absorbed(
            queries.of(tokens), cache, others, output[tokens], scale, None, None,
            is_prefill=others.max_seqlen_q > 1,
        )  # fmt: skip
    for chunk in chunks:
        expanded_attention(queries, cache, metadata, chunk, output, scale)


def _absorbed(
    queries: LatentQueries,
    cache: LatentCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    scale: float,
    positions: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    is_prefill: bool,
) -> None:
    attended = output.new_empty(*output.shape[:2], queries.sizes.latent)
    latent_attention(
        queries.absorbed(), cache, metadata, attended, scale, positions, sinks,
        is_prefill=is_prefill,
    )  # fmt: skip
    output.copy_(queries.values(attended))


def _between(
    metadata: AttentionMetadata, chunks: Sequence[PromptChunk]
) -> Iterator[tuple[slice, AttentionMetadata]]:
    """Yields the tokens and the metadata of each run of requests that are none of the chunks."""
    first_request = first_token = 0
    num_requests, num_tokens = len(metadata.seq_lens), len(metadata.slot_mapping)
    ends = [(chunk.request, chunk.first_token, chunk.num_queries) for chunk in chunks]
    for request, token, num_queries in (*ends, (num_requests, num_tokens, 0)):
        if request > first_request:
            yield (
                slice(first_token, token),
                _part(metadata, slice(first_request, request), slice(first_token, token)),
            )
        first_request, first_token = request + 1, token + num_queries


def _part(metadata: AttentionMetadata, requests: slice, tokens: slice) -> AttentionMetadata:
    """Returns the metadata of neighbouring requests, without chunks."""
    starts = metadata.query_start_loc[requests.start : requests.stop + 1]
    lengths = [
        chunk.num_queries
        for chunk in metadata.chunks
        if requests.start <= chunk.request < requests.stop
    ]
    return replace(
        metadata,
        query_start_loc=starts - tokens.start,
        seq_lens=metadata.seq_lens[requests],
        row_ids=metadata.row_ids[requests],
        block_tables=metadata.block_tables[requests],
        slot_mapping=metadata.slot_mapping[tokens],
        chunks=(),
        max_seqlen_q=max(lengths, default=1),
    )
