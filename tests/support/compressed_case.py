"""Batches for attention to recent and compressed keys with random contents, and the reference."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from models.forward_context import AttentionMetadata, Context, ForwardContext, forward_context
from models.kv_cache import RowCacheData
from models.ops.attention import compressed_attention as operator
from models.ops.attention.attention_metadata import build_attention_metadata
from tests.support.attention_case import scattered_blocks, token_request

SPAN = 4
"""Blocks of tokens that have as many as a block of entries."""


@dataclass(frozen=True, kw_only=True)
class CompressedCase:
    """One step of one layer; arguments are those of the operator from the sinks on."""

    q: torch.Tensor
    recent: torch.Tensor
    caches: tuple[RowCacheData, ...]
    metadata: tuple[AttentionMetadata, ...]
    positions: torch.Tensor
    window: int
    arguments: tuple[object, ...]

    def run(self) -> torch.Tensor:
        """Runs the operator on the case's caches; returns the output."""
        output = torch.full_like(self.q, torch.nan)
        self.run_into(output)
        return output

    def run_into(self, output: torch.Tensor) -> None:
        """Runs the operator; nothing else, so that it can be captured."""
        metadata = self.metadata[0]
        shape = Context(
            positions=self.positions,
            is_prefill=metadata.max_seqlen_q > 1,
            batch_size=len(metadata.seq_lens),
            num_tokens=len(self.q),
            max_q_len=metadata.max_seqlen_q,
        )
        context = ForwardContext(
            context=shape,
            attn_metadata=metadata,
            kv_cache_data=list(self.caches),
            layer_attn_metadata=list(self.metadata),
        )
        scale = self.q.shape[-1] ** -0.5
        with forward_context(context):
            torch.ops.octavo.compressed_attention_with_output(
                self.q, self.recent, output, 0, self.window, scale, *self.arguments
            )

    def run_reading(self) -> torch.Tensor:
        """Returns the reference's output over entries as they are cached.

        Entries that are rounded in another order may change which of two near scores is chosen.
        """
        with patch.object(operator, "_complete"):
            return self.run()

    def exact(self) -> "CompressedCase":
        """Returns the case on the CPU, where the reference runs, in float64 but for its softmax."""

        def exact(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return value.cpu().double() if value.is_floating_point() else value.cpu()

        return replace(
            self,
            q=exact(self.q),
            recent=exact(self.recent),
            caches=tuple(replace(each, rows=exact(each.rows)) for each in self.caches),
            metadata=tuple(_on_the_cpu(each, self.positions) for each in self.metadata),
            positions=self.positions.cpu(),
            arguments=tuple(exact(each) for each in self.arguments),
        )


def _on_the_cpu(metadata, positions):
    starts = metadata.query_start_loc.cpu()
    return _metadata(
        starts,
        metadata.seq_lens.cpu(),
        metadata.block_tables.cpu(),
        positions.cpu(),
        (metadata.max_seqlen_q, metadata.max_seqlen_k),
    )


def _metadata(starts, lengths, table, positions, longest, block_size=16):
    return build_attention_metadata(
        query_start_loc=starts,
        seq_lens=lengths,
        row_ids=torch.arange(len(lengths), dtype=torch.int32, device=table.device),
        block_table=table,
        positions=positions,
        token_request=token_request(starts),
        block_size=block_size,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
    )


def make_compressed_case(
    query_lens,
    seq_lens,
    *,
    num_heads,
    size,
    rope_dim,
    rate=0,
    top_k=None,
    window=20,
    dtype=torch.float32,
    block_size=16,
    device="cpu",
    seed=0,
):
    """Draws a case whose blocks lie scattered; a rate of 0: there are no entries.

    With top_k entries overlap, and an index of 7 heads of size 40, or 128 where more is rotated,
    chooses some. Its weights are positive: with others several entries would tie for the last rank.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    requests = token_request(starts)
    num_tokens, overlaps = sum(query_lens), top_k is not None
    ends = (lengths - starts[1:]).long().index_select(0, requests)
    positions = (ends + torch.arange(num_tokens, device=device)).clamp(min=0)
    table = scattered_blocks(seq_lens, block_size, generator, device)
    longest = max(query_lens), max(1, *seq_lens)
    metadata = [_metadata(starts, lengths, table, positions, longest, block_size)]
    width = 2 * size if overlaps else size
    index_size = (40 if rope_dim <= 40 else 128) if overlaps else 0
    row_size = size if not rate else size + 2 * width + 4 * index_size
    caches = [
        RowCacheData(
            rows=draw(1 + table.numel(), block_size, row_size), rate=1, block_tokens=block_size
        )
    ]
    sinks = draw(num_heads).float()
    arguments = (sinks, -1, 0, False, None, None, 1e-6, None, 1.0, None, None, None, None, 0)
    if rate:
        entry_tokens = block_size * SPAN
        entry_table = scattered_blocks(seq_lens, entry_tokens, generator, device)
        num_rows = -(-entry_tokens // rate)
        num_blocks = 1 + entry_table.numel()
        entry_table = entry_table.repeat_interleave(SPAN, 1)[:, : table.shape[1]].contiguous()
        metadata.append(_metadata(starts, lengths, entry_table, positions, longest, block_size))
        # Blocks may be apart.
        rows = draw(num_blocks, num_rows * (size + index_size) + 8)
        rows = rows[:, : num_rows * (size + index_size)].unflatten(1, (num_rows, -1))
        caches.append(RowCacheData(rows=rows, rate=rate, block_tokens=entry_tokens))
        frequencies = 10000.0 ** -torch.linspace(0, 0.9, rope_dim // 2, device=device)
        of_index = (None, None, None, None, 0)
        if overlaps:
            of_index = (
                draw(num_tokens, 7, index_size),
                draw(num_tokens, 7).float().abs(),
                draw(rate, 2 * index_size).float(),
                1 + draw(index_size) / 4,
                top_k,
            )
        arguments = (
            *(sinks, 1, rate, overlaps, draw(rate, width).float(), 1 + draw(size) / 4, 1e-6),
            *(frequencies, 0.9),
            *of_index,
        )
    return CompressedCase(
        q=draw(num_tokens, num_heads, size),
        recent=draw(num_tokens, row_size),
        caches=tuple(caches),
        metadata=tuple(metadata),
        positions=positions,
        window=window,
        arguments=arguments,
    )
