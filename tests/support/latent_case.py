"""Batches for attention to latent vectors with random contents, and the reference's answer."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

import models.ops.attention.latent_attention  # noqa: F401  # registers the operator
from models.forward_context import (
    AttentionMetadata,
    AttentionWorkspace,
    Context,
    ForwardContext,
    PromptChunk,
    forward_context,
)
from models.kv_cache import LatentCacheData
from models.ops.attention.attention_metadata import build_attention_metadata
from models.ops.operands.latent_queries import LatentQueries
from models.ops.triton.attention.configurations import MAX_LATENT_PARTIALS
from tests.support.attention_case import scattered_blocks, token_request


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """One step of one layer."""

    queries: LatentQueries
    entry: torch.Tensor
    cache: LatentCacheData
    metadata: AttentionMetadata
    positions: torch.Tensor
    scale: float
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None
    """Queries, keys, weights and top_k."""
    is_prefill: bool

    def run(self) -> torch.Tensor:
        """Runs the operator on the case's cache; returns the output."""
        shape = *self.queries.plain.shape[:2], self.queries.sizes.value
        output = self.entry.new_full(shape, torch.nan)
        self.run_into(output)
        return output

    def run_into(self, output: torch.Tensor) -> None:
        """Runs the operator; nothing else, so that it can be captured."""
        with forward_context(self.context()):
            torch.ops.octavo.latent_attention_with_output(*self.arguments(output))

    def arguments(self, output: torch.Tensor) -> tuple[object, ...]:
        """Returns the operator's arguments."""
        queries = self.queries
        return (
            *(queries.plain, queries.rotated, self.entry, queries.projections),
            *(output, 0, self.scale, *(self.index or ())),
        )

    def context(self) -> ForwardContext:
        """Returns the context that the operator runs in."""
        num_requests = len(self.metadata.seq_lens)
        shape = Context(
            positions=self.positions,
            is_prefill=self.is_prefill,
            batch_size=num_requests,
            num_tokens=len(self.entry),
            max_q_len=self.metadata.max_seqlen_q,
        )
        return ForwardContext(
            context=shape, attn_metadata=self.metadata, kv_cache_data=[self.cache]
        )

    def exact(self) -> "LatentCase":
        """Returns the case in float64 on the CPU, where the reference runs."""
        metadata, positions = self.metadata, self.positions.cpu()
        cached = self.cache.index_keys
        index = self.index
        if index is not None:
            index_q, index_k, weights, top_k = index
            index = index_q.cpu().double(), index_k.cpu().double(), weights.cpu(), top_k
        starts = metadata.query_start_loc.cpu()
        return replace(
            self,
            queries=LatentQueries(
                plain=self.queries.plain.cpu().double(),
                rotated=self.queries.rotated.cpu().double(),
                projections=self.queries.projections.cpu().double(),
            ),
            entry=self.entry.cpu().double(),
            cache=LatentCacheData(
                latent=self.cache.latent.cpu().double(),
                index_keys=None if cached is None else cached.cpu().double(),
            ),
            index=index,
            positions=positions,
            metadata=build_attention_metadata(
                query_start_loc=starts,
                seq_lens=metadata.seq_lens.cpu(),
                row_ids=torch.arange(len(metadata.seq_lens)),
                block_table=metadata.block_tables.cpu(),
                positions=positions,
                token_request=token_request(starts),
                block_size=self.cache.latent.shape[1],
                max_seqlen_q=metadata.max_seqlen_q,
                max_seqlen_k=metadata.max_seqlen_k,
            ),
        )


def make_latent_case(
    query_lens,
    seq_lens,
    *,
    num_heads,
    latent_dim,
    rope_dim,
    plain_dim=16,
    value_dim=16,
    dtype=torch.float32,
    block_size=16,
    device="cpu",
    top_k=None,
    is_prefill=None,
    seed=0,
):
    """Draws a case; blocks lie scattered, and the workspace is poisoned.

    With top_k there is an index, of 7 heads of size 20. Its weights are positive, so that a token
    that no head sees scores lowest: with others several such tokens tie for the last rank in a row
    or two of each case, and the choice among them is arbitrary. Queries of several tokens belong to
    prompts unless told otherwise.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    size = latent_dim + rope_dim
    table = scattered_blocks(seq_lens, block_size, generator, device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    requests = token_request(starts)
    ends = (lengths - starts[1:]).long().index_select(0, requests)
    positions = (ends + torch.arange(sum(query_lens), device=device)).clamp(min=0)
    num_tokens, num_blocks = sum(query_lens), 1 + table.numel()
    index, index_keys = None, None
    if top_k is not None:
        weights = draw(num_tokens, 7).float().abs()
        index = draw(num_tokens, 7, 20), draw(num_tokens, 20), weights, top_k
        index_keys = draw(num_blocks, block_size, 20)
    num_partials = MAX_LATENT_PARTIALS * num_heads
    return LatentCase(
        queries=LatentQueries(
            # Strided, as a part of a projection.
            plain=draw(num_tokens, num_heads, plain_dim + rope_dim)[..., :plain_dim],
            rotated=draw(num_tokens, num_heads, rope_dim),
            projections=draw(num_heads * (plain_dim + value_dim), latent_dim) * latent_dim**-0.5,
        ),
        entry=draw(num_tokens, size),
        cache=LatentCacheData(latent=draw(num_blocks, block_size, size), index_keys=index_keys),
        index=index,
        metadata=build_attention_metadata(
            query_start_loc=starts,
            seq_lens=lengths,
            row_ids=torch.arange(len(seq_lens), dtype=torch.int32, device=device),
            block_table=table,
            positions=positions,
            token_request=requests,
            block_size=block_size,
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(1, *seq_lens),
            chunks=prompt_chunks(query_lens, seq_lens),
            workspace=AttentionWorkspace(
                partials=torch.full((num_partials * latent_dim,), torch.nan, device=device),
                lse=torch.full((num_partials,), torch.nan, device=device),
                counters=torch.zeros(1, dtype=torch.int32, device=device),
            ),
        ),
        positions=positions,
        is_prefill=max(query_lens) > 1 if is_prefill is None else is_prefill,
        scale=(plain_dim + rope_dim) ** -0.5 * 1.3,
    )


def prompt_chunks(query_lens, seq_lens):
    """Returns the requests with several query tokens, as a worker does."""
    starts = [0, *accumulate(query_lens)]
    return tuple(
        PromptChunk(
            request=request, first_token=starts[request], num_queries=num_queries, num_keys=num_keys
        )
        for request, (num_queries, num_keys) in enumerate(zip(query_lens, seq_lens, strict=True))
        if num_queries > 1
    )
