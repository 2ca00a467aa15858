"""Batches for attention to chosen blocks of keys with random contents, and the reference."""

from dataclasses import dataclass, replace

import torch

import models.ops.attention.block_sparse_attention  # noqa: F401  # registers the operator
from models.forward_context import forward_context
from tests.support.attention_case import (
    AttentionCase,
    make_case,
    metadata_alone,
    token_request,
)


@dataclass(frozen=True, kw_only=True)
class BlockSparseCase:
    """One step of one layer: attention's inputs, cache and metadata, and the index."""

    plain: AttentionCase
    index_q: torch.Tensor
    index_k: torch.Tensor
    block_size: int
    top_blocks: int
    local_blocks: int

    @property
    def is_live(self) -> torch.Tensor:
        """Returns which tokens are of requests that have keys, [T]."""
        metadata = self.plain.metadata
        return (metadata.seq_lens > 0)[token_request(metadata.query_start_loc)]

    def run(self) -> torch.Tensor:
        """Runs the operator on the case's cache; returns the output."""
        output = torch.full_like(self.plain.q, torch.nan)
        self.run_into(output)
        return output

    def run_into(self, output: torch.Tensor) -> None:
        """Runs the operator; nothing else, so that it can be captured."""
        plain = self.plain
        with forward_context(plain.context()):
            torch.ops.octavo.block_sparse_attention_with_output(
                plain.q, plain.k, plain.v, output, 0, self.index_q, self.index_k, self.block_size,
                self.top_blocks, self.local_blocks, plain.q.shape[-1] ** -0.5,
            )  # fmt: skip

    def alone(self, token: int) -> "BlockSparseCase":
        """Returns one token of the case as the only one of its step; for kernels."""
        plain, own = self.plain, slice(token, token + 1)
        num_keys, block_size = int(plain.positions[token]) + 1, plain.cache.k.shape[1]
        metadata = metadata_alone(plain.metadata, token, num_keys, block_size)
        plain = replace(
            plain,
            metadata=metadata,
            positions=plain.positions[own],
            **{name: getattr(plain, name)[own].contiguous() for name in ("q", "k", "v")},
        )
        index_q, index_k = self.index_q[own].contiguous(), self.index_k[own].contiguous()
        return replace(self, plain=plain, index_q=index_q, index_k=index_k)

    def exact(self) -> "BlockSparseCase":
        """Returns the case on the CPU, where the reference runs, in float64."""
        plain = self.plain.exact()
        stored = self.plain.cache.index_keys
        cache = replace(plain.cache, index_keys=stored.cpu().double())
        return replace(
            self,
            plain=replace(plain, cache=cache),
            index_q=self.index_q.cpu().double(),
            index_k=self.index_k.to(stored.dtype).cpu().double(),
        )

    def with_exact_keys(self) -> "BlockSparseCase":
        """Returns the exact case with all that the cache holds now, and nothing to be written."""
        exact = self.exact()
        reading = self.plain.exact_reading()
        cache = replace(reading.cache, index_keys=exact.plain.cache.index_keys)
        return replace(exact, plain=replace(reading, cache=cache))


def make_block_sparse_case(
    query_lens,
    seq_lens,
    heads,
    *,
    index_dim=32,
    block_size=24,
    top_blocks=3,
    local_blocks=1,
    dtype=torch.float32,
    cache_block_size=16,
    device="cpu",
    has_fp8_cache=False,
    seed=0,
):
    """Draws a case whose cache blocks lie scattered."""
    plain = make_case(
        query_lens, seq_lens, heads, dtype=dtype, block_size=cache_block_size, device=device,
        has_rotation=False, has_fp8_cache=has_fp8_cache, seed=seed,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed + 1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_tokens = sum(query_lens)
    keys = draw(*plain.cache.k.shape[:2], index_dim)
    if has_fp8_cache:
        keys = keys.bfloat16()
    return BlockSparseCase(
        plain=replace(plain, cache=replace(plain.cache, index_keys=keys)),
        index_q=draw(num_tokens, heads.num_kv_heads, index_dim),
        index_k=draw(num_tokens, index_dim),
        block_size=block_size,
        top_blocks=top_blocks,
        local_blocks=local_blocks,
    )
