"""Batches for attention to latent vectors with random contents, and the reference's answer."""

from dataclasses import dataclass, fields, replace
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
from models.kernels.attention.configurations import MAX_LATENT_PARTIALS, MAX_PARTIALS
from models.kv_cache import ROTATED_CACHE_DTYPE, LatentCacheData
from models.operands.index_queries import IndexQueries
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.operands.latent_queries import LatentQueries
from models.ops.attention.attention_metadata import build_attention_metadata
from models.ops.attention.index_rounding import quantize_index
from models.ops.attention.kv_cache import quantize_heads
from models.ops.attention.latent_cache import read_latents
from models.ops.attention.latent_transform import transform_latents
from tests.support.attention_case import metadata_alone, scattered_blocks, token_request


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """One step of one layer."""

    queries: LatentQueries
    entries: LatentEntries
    transform: LatentTransform | None
    cache: LatentCacheData
    metadata: AttentionMetadata
    positions: torch.Tensor
    scale: float
    index: IndexQueries | None
    sinks: torch.Tensor | None
    is_prefill: bool

    def run(self) -> torch.Tensor:
        """Runs the operator on the case's cache; returns the output."""
        output = self.empty_output()
        self.run_into(output)
        return output

    def empty_output(self) -> torch.Tensor:
        """Returns an output that nothing has written to."""
        shape = *self.queries.plain.shape[:2], self.queries.sizes.value
        return self.queries.plain.new_full(shape, torch.nan)

    def run_into(self, output: torch.Tensor) -> None:
        """Runs the operator; nothing else, so that it can be captured."""
        with forward_context(self.context()):
            torch.ops.octavo.latent_attention_with_output(*self.arguments(output))

    def arguments(self, output: torch.Tensor) -> tuple[object, ...]:
        """Returns the operator's arguments."""
        queries, entries, index = self.queries, self.entries, self.index
        transform = self.transform
        return (
            *(queries.plain, queries.rotated, entries.latent, entries.rotated),
            *(queries.projections, output, 0, self.scale),
            *((None,) * 3 if index is None else (index.q, entries.index_keys, index.weights)),
            0 if index is None else index.top_k,
            self.sinks,
            *(() if transform is None else (transform.cos, transform.signed_sin)),
            *(() if transform is None else (transform.weight, transform.eps)),
        )

    def context(self) -> ForwardContext:
        """Returns the context that the operator runs in."""
        num_requests = len(self.metadata.seq_lens)
        shape = Context(
            positions=self.positions,
            is_prefill=self.is_prefill,
            batch_size=num_requests,
            num_tokens=len(self.queries.plain),
            max_q_len=self.metadata.max_seqlen_q,
        )
        return ForwardContext(
            context=shape, attn_metadata=self.metadata, kv_cache_data=[self.cache]
        )

    def alone(self, token: int) -> "LatentCase":
        """Returns one token of the case, without a transform, as the only one of its step."""
        assert self.transform is None, "the caller takes transformed ones"
        own, entries = slice(token, token + 1), self.entries
        num_keys, block_size = int(self.positions[token]) + 1, self.cache.latent.shape[1]
        keys = entries.index_keys
        return replace(
            self,
            queries=self.queries.of(own),
            entries=LatentEntries(
                latent=entries.latent[own],
                rotated=entries.rotated[own],
                index_keys=None if keys is None else keys[own],
            ),
            index=None if self.index is None else self.index.alone(own),
            metadata=metadata_alone(self.metadata, token, num_keys, block_size),
            positions=self.positions[own],
        )

    def transformed(self) -> "LatentCase":
        """Returns the case without its transform, which the separate operators compute."""
        assert self.transform is not None, "the case has one"
        rotated, entries = transform_latents(self.queries.rotated, self.entries, self.transform)
        queries = replace(self.queries, rotated=rotated)
        cache = LatentCacheData(**{k: v.clone() for k, v in self.cache.tensors().items()})
        return replace(self, queries=queries, entries=entries, transform=None, cache=cache)

    def exact_reading(self) -> "LatentCase":
        """Returns the exact case that reads what a run of this case has written."""
        exact = self.exact()
        blocks = torch.arange(self.cache.num_blocks)
        latent, rotated = read_latents(exact_cache(self.cache), blocks, torch.float64)
        slots = self.metadata.slot_mapping.cpu()
        entries = replace(
            exact.entries,
            latent=latent.flatten(0, 1)[slots],
            rotated=rotated.flatten(0, 1)[slots].unsqueeze(1),
        )
        queries = exact.queries
        if exact.transform is not None:
            turned, _ = transform_latents(queries.rotated, exact.entries, exact.transform)
            queries = replace(queries, rotated=turned)
        # Rounding the index once more gives the same.
        cache = replace(exact.cache, latent=latent, rotated=rotated, latent_scale=None)
        return replace(exact, queries=queries, entries=entries, transform=None, cache=cache)

    def exact(self) -> "LatentCase":
        """Returns the case in float64 on the CPU, where the reference runs."""
        metadata, positions = self.metadata, self.positions.cpu()
        starts = metadata.query_start_loc.cpu()
        return replace(
            self,
            queries=_exact(self.queries),
            entries=_exact(self.entries),
            transform=None if self.transform is None else _exact(self.transform),
            cache=exact_cache(self.cache),
            index=None if self.index is None else _exact(self.index),
            sinks=None if self.sinks is None else self.sinks.cpu().double(),
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


def exact_cache(cache):
    """Returns a cache on the CPU: a copy if it is FP8, else in float64."""
    if cache.latent_scale is None:
        return _exact(cache)
    return LatentCacheData(**{k: v.cpu().clone() for k, v in cache.tensors().items()})


def _exact(operands):
    """Returns operands of a dataclass in float64 on the CPU."""
    tensors = {field.name: getattr(operands, field.name) for field in fields(operands)}
    changes = {
        name: tensor.cpu().double()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }
    if "weights" in changes:
        changes["weights"] = tensors["weights"].cpu()
    return replace(operands, **changes)


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
    has_transform=False,
    has_fp8_cache=False,
    has_sinks=False,
    is_prefill=None,
    seed=0,
):
    """Draws a case; blocks lie scattered, and the workspace is poisoned.

    With top_k there is an index, of 7 heads of size 20, or 32 and whole numbers with an FP8 cache:
    FP8 represents them, and tensor cores add their products exactly. Its weights are positive, so
    that a token that no head sees scores lowest: with others several such tokens tie for the last
    rank in a row or two of each case, and the choice among them is arbitrary. Queries of several
    tokens belong to prompts unless told otherwise. Sinks need top_k.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    table = scattered_blocks(seq_lens, block_size, generator, device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    requests = token_request(starts)
    ends = (lengths - starts[1:]).long().index_select(0, requests)
    positions = (ends + torch.arange(sum(query_lens), device=device)).clamp(min=0)
    num_tokens, num_blocks = sum(query_lens), 1 + table.numel()
    index, new_index_keys, index_keys, transform = None, None, None, None
    if top_k is not None:
        weights = draw(num_tokens, 7).float().abs()
        size = 32 if has_fp8_cache else 20
        drawn = (
            draw(num_tokens, 7, size),
            draw(num_tokens, size),
            draw(num_blocks, block_size, size),
        )
        if has_fp8_cache:
            drawn = [each.mul(2).round() for each in drawn]
        index_q, new_index_keys, index_keys = drawn
        index = IndexQueries(q=index_q, weights=weights, top_k=top_k)
    if has_transform:
        angles = torch.randn(num_tokens, 1, rope_dim // 2, generator=generator, device=device)
        cos, sin = angles.cos(), angles.sin()
        table_rows = torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)
        cos, signed_sin = table_rows.chunk(2, dim=-1)
        weight = 1 + draw(latent_dim) / 4
        transform = LatentTransform(cos=cos, signed_sin=signed_sin, weight=weight, eps=1e-6)
    latent, latent_scale = draw(num_blocks, block_size, latent_dim), None
    index_scale = None
    rotated = draw(num_blocks, block_size, rope_dim)
    if has_fp8_cache:
        latent, latent_scale = quantize_heads(latent)
        rotated = rotated.to(ROTATED_CACHE_DTYPE)
        if index_keys is not None:
            index_keys, index_scale = quantize_index(index_keys)
    num_partials = MAX_LATENT_PARTIALS * num_heads
    # Strided, as parts of projections.
    heads = draw(num_tokens, num_heads, plain_dim + rope_dim)
    compressed = draw(num_tokens, 8 + latent_dim + rope_dim)[:, 8:]
    return LatentCase(
        queries=LatentQueries(
            plain=heads[..., :plain_dim],
            rotated=heads[..., plain_dim:],
            projections=draw(num_heads * (plain_dim + value_dim), latent_dim) * latent_dim**-0.5,
        ),
        entries=LatentEntries(
            latent=compressed[:, :latent_dim],
            rotated=compressed[:, latent_dim:].unsqueeze(1),
            index_keys=new_index_keys,
        ),
        transform=transform,
        cache=LatentCacheData(
            latent=latent,
            rotated=rotated,
            latent_scale=latent_scale,
            index_keys=index_keys,
            index_scale=index_scale,
        ),
        index=index,
        sinks=draw(num_heads).float() * 3 if has_sinks else None,
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
                lse=torch.full((2 * num_partials,), torch.nan, device=device),
                counters=torch.zeros(MAX_PARTIALS, dtype=torch.int32, device=device),
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
