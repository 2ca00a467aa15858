"""Batches for paged attention with random contents, and the reference's output for them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

import models.ops.attention.attention  # noqa: F401  # registers the operator
from models.forward_context import (
    AttentionMetadata,
    AttentionWorkspace,
    Context,
    ForwardContext,
    ImageMetadata,
    PromptChunk,
    forward_context,
)
from models.kernels.attention.configurations import (
    MAX_PARTIALS,
    MAX_TILE_PARTS,
    ROWS_OF_TILE,
    most_few_rows,
)
from models.kv_cache import KVCacheData
from models.operands.head_transform import HeadTransform
from models.ops.attention.attention_metadata import build_attention_metadata
from models.ops.attention.kv_cache import quantize_heads


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query heads, kv heads and head dimension."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One step of one layer: inputs of the operator, cache and metadata."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCacheData
    metadata: AttentionMetadata
    positions: torch.Tensor
    transform: HeadTransform | None
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    scale: float | None = None
    soft_cap: float = 0.0
    rounds: bool = False
    key_ends: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        """Runs the operator on the case's cache; returns the output."""
        output = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        self.run_into(output)
        return output

    def run_into(self, output: torch.Tensor) -> None:
        """Runs the operator; nothing else, so that it can be captured."""
        with forward_context(self.context()):
            torch.ops.octavo.unified_attention_with_output(*self.arguments(output))

    def arguments(self, output: torch.Tensor) -> tuple[object, ...]:
        """Returns the operator's arguments."""
        plain = (self.q, self.k, self.v, output, 0)
        turn = self.transform
        transform = (None, None, None, None, 0.0)
        if turn is not None:
            transform = (turn.cos, turn.signed_sin, turn.q_weight, turn.k_weight, turn.eps)
        return (*plain, *transform, *self.options())

    def options(self) -> tuple[object, ...]:
        """Returns the operator's last arguments."""
        return self.sliding_window, self.sinks, self.scale, self.soft_cap, self.rounds

    def context(self) -> ForwardContext:
        """Returns the context that the operator runs in."""
        num_requests = len(self.metadata.seq_lens)
        shape = Context(
            positions=self.positions,
            is_prefill=self.metadata.max_seqlen_q > 1,
            batch_size=num_requests,
            num_tokens=len(self.q),
            max_q_len=self.metadata.max_seqlen_q,
        )
        images = None
        if self.key_ends is not None:
            images = ImageMetadata(
                rows=self.q[:0], index=None, rope_positions=None, key_ends=self.key_ends
            )
        return ForwardContext(
            context=shape,
            attn_metadata=self.metadata,
            kv_cache_data=[self.cache],
            image_metadata=images,
        )

    def exact(self) -> "AttentionCase":
        """Returns the case, less its padding, in float64 on the CPU, where the reference runs."""

        starts, seq_lens = self.metadata.query_start_loc.cpu(), self.metadata.seq_lens.cpu()
        num_tokens = int(starts[-1])

        def double(x):
            return x if x is None else x.detach().cpu().double()

        turn = self.transform
        if turn is not None:
            turn = HeadTransform(
                cos=double(turn.cos[:num_tokens]),
                signed_sin=double(turn.signed_sin[:num_tokens]),
                q_weight=double(turn.q_weight),
                k_weight=double(turn.k_weight),
                eps=turn.eps,
            )
        metadata = build_attention_metadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            row_ids=torch.arange(len(seq_lens)),
            block_table=self.metadata.block_tables.cpu(),
            positions=self.positions[:num_tokens].cpu(),
            token_request=token_request(starts),
            block_size=self.cache.k.shape[1],
            max_seqlen_q=self.metadata.max_seqlen_q,
            max_seqlen_k=self.metadata.max_seqlen_k,
        )
        return AttentionCase(
            q=double(self.q[:num_tokens]),
            k=double(self.k[:num_tokens]),
            v=double(self.v[:num_tokens]),
            cache=exact_cache(self.cache),
            metadata=metadata,
            positions=self.positions[:num_tokens].cpu(),
            transform=turn,
            sliding_window=self.sliding_window,
            sinks=double(self.sinks),
            scale=self.scale,
            soft_cap=self.soft_cap,
            key_ends=None if self.key_ends is None else self.key_ends.cpu(),
        )

    def exact_reading(self) -> "AttentionCase":
        """Returns the exact case with all that the cache holds now, and nothing to be written."""
        exact = self.exact()
        # All of the step's keys and values go to the null block.
        slots = torch.zeros_like(exact.metadata.slot_mapping)
        return replace(exact, metadata=replace(exact.metadata, slot_mapping=slots))

    def leave_window(self) -> None:
        """Drops the blocks before the window of every query from the tables."""
        if self.sliding_window is None:
            return
        metadata = self.metadata
        starts = metadata.seq_lens - metadata.query_start_loc.diff()
        first = (starts - self.sliding_window + 1).clamp(min=0)
        if self.sliding_window < 0:
            first = starts // -self.sliding_window * -self.sliding_window
        first = first // self.cache.k.shape[1]
        entries = torch.arange(metadata.block_tables.shape[1], device=starts.device)
        metadata.block_tables.masked_fill_(entries < first.unsqueeze(1), 0)

    def with_chunks(self) -> "AttentionCase":
        """Returns the same case with chunks that the host knows."""
        starts, seq_lens = self.metadata.query_start_loc.tolist(), self.metadata.seq_lens.tolist()
        chunks = tuple(
            PromptChunk(
                request=request,
                first_token=first,
                num_queries=end - first,
                num_keys=seq_lens[request],
            )
            for request, (first, end) in enumerate(pairwise(starts))
            if end - first > 1
        )
        return replace(self, metadata=replace(self.metadata, chunks=chunks))

    def unsplit(self) -> "AttentionCase":
        """Returns the same case without a workspace."""
        return replace(self, metadata=replace(self.metadata, workspace=None))


def exact_cache(cache: KVCacheData) -> KVCacheData:
    """Returns a copy of a cache, in float64 on the CPU."""

    def double(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        exact = stored.cpu().double()
        return exact if scale is None else exact * scale.cpu().double().unsqueeze(-1)

    return KVCacheData(k=double(cache.k, cache.k_scale), v=double(cache.v, cache.v_scale))


def make_cache(k: torch.Tensor, v: torch.Tensor, *, is_fp8: bool) -> KVCacheData:
    """Returns a cache of keys and values [N, B, Hk, D], if asked for rounded to 8 bits."""
    if not is_fp8:
        return KVCacheData(k=k, v=v)
    (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
    return KVCacheData(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def metadata_alone(
    metadata: AttentionMetadata, token: int, num_keys: int, block_size: int
) -> AttentionMetadata:
    """Returns the metadata of a step of one of its tokens alone; for kernels."""
    request = int(token_request(metadata.query_start_loc)[token])
    own, num_blocks = slice(request, request + 1), -(-num_keys // block_size)
    return replace(
        metadata,
        query_start_loc=metadata.query_start_loc.new_tensor([0, 1]),
        seq_lens=metadata.seq_lens.new_tensor([num_keys]),
        row_ids=metadata.row_ids[own],
        block_tables=metadata.block_tables[own, :num_blocks].contiguous(),
        slot_mapping=metadata.slot_mapping[token : token + 1],
        groups=(),
        chunks=(),
        max_seqlen_q=1,
        max_seqlen_k=num_keys,
    )


def token_request(query_start_loc: torch.Tensor) -> torch.Tensor:
    """Returns the request of each token."""
    lengths = query_start_loc.diff().long()
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def make_case(
    query_lens,
    seq_lens,
    heads,
    *,
    dtype=torch.float32,
    block_size=16,
    device="cpu",
    has_rotation=True,
    has_norm=True,
    sliding_window=None,
    has_sinks=False,
    has_fp8_cache=False,
    scale=None,
    soft_cap=0.0,
    seed=0,
    has_spare_blocks=True,
    images=None,
):
    """Draws a case; its blocks are scattered, and the rest of the cache holds other values.

    has_spare_blocks: the cache has as many blocks for each sequence as the longest one owns.
    images: (request, start, end) of positions that see each other; None: all see earlier ones.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_tokens, num_requests = sum(query_lens), len(seq_lens)
    query_heads, kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    table = scattered_blocks(seq_lens, block_size, generator, device)
    num_blocks = table.numel()
    if not has_spare_blocks:
        owned = table[table > 0].sort().values
        num_blocks = len(owned)
        table = table.where(table == 0, torch.searchsorted(owned, table, out_int32=True) + 1)
    cache_shape = (1 + num_blocks, block_size, kv_heads, head_dim)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    requests = token_request(starts)
    ends = (lengths - starts[1:]).long().index_select(0, requests)
    positions = (ends + torch.arange(num_tokens, device=device)).clamp(min=0)
    projected = draw(num_tokens, query_heads + 2 * kv_heads, head_dim)
    q, k, v = projected.split((query_heads, kv_heads, kv_heads), dim=1)
    transform = None
    if has_rotation:
        angles = draw(num_tokens, 1, head_dim // 2).float() * 3
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)
        transform = HeadTransform(
            cos=both.chunk(2, dim=-1)[0],
            signed_sin=both.chunk(2, dim=-1)[1],
            q_weight=draw(head_dim) if has_norm else None,
            k_weight=draw(head_dim) if has_norm else None,
            eps=1e-6,
        )
    metadata = build_attention_metadata(
        query_start_loc=starts,
        seq_lens=lengths,
        row_ids=torch.arange(num_requests, dtype=torch.int32, device=device),
        block_table=table,
        positions=positions,
        token_request=requests,
        block_size=block_size,
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(1, *seq_lens),
        workspace=make_workspace(heads, device),
    )
    return AttentionCase(
        q=q if has_rotation else q.contiguous(),
        k=k,
        v=v,
        cache=make_cache(draw(*cache_shape), draw(*cache_shape), is_fp8=has_fp8_cache),
        metadata=metadata,
        positions=positions,
        transform=transform,
        sliding_window=sliding_window,
        sinks=draw(query_heads) if has_sinks else None,
        scale=scale,
        soft_cap=soft_cap,
        key_ends=None if images is None else key_ends(requests, positions, images),
    )


def key_ends(requests, positions, images):
    """Returns the key_ends of ImageMetadata for images, (request, start, end) each."""
    ends = positions.int() + 1
    for request, start, end in images:
        ends[(requests == request) & (positions >= start) & (positions < end)] = end
    return ends


def scattered_blocks(seq_lens, block_size, generator, device):
    """Returns a block table whose requests own blocks in random order, all after the null block."""
    width = max(1, -(-max(seq_lens) // block_size))
    order = torch.randperm(len(seq_lens) * width, generator=generator, device=device) + 1
    table = order.int().view(len(seq_lens), width)
    owned = torch.tensor([[-(-length // block_size)] for length in seq_lens], device=device)
    return table.where(torch.arange(width, device=device) < owned, 0)


def make_workspace(heads, device):
    """Returns a workspace on any device; its partial results are poisoned."""
    num_partials = MAX_PARTIALS * (heads.num_heads // heads.num_kv_heads)
    few = most_few_rows(torch.device(device))
    num_partials = max(num_partials, MAX_TILE_PARTS * ROWS_OF_TILE, few)
    return AttentionWorkspace(
        partials=torch.full((num_partials * heads.head_dim,), torch.nan, device=device),
        lse=torch.full((num_partials,), torch.nan, device=device),
        counters=torch.zeros(MAX_PARTIALS, dtype=torch.int32, device=device),
    )
