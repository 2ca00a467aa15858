"""Runs a model over batches of sequences through a paged cache with scattered blocks.

The worker's part of a forward pass in its plainest form, for tests of model code.
"""

import random
from dataclasses import dataclass, field, replace

import torch

from models.forward_context import Context, ForwardContext, forward_context
from models.layers.decoder import CausalLM
from models.ops.attention.attention_metadata import build_attention_metadata
from models.state_cache import StateCacheData, StateSpec

POISON = 1e4
"""Content of unwritten cache entries: finite, as a cache must be, but reading it spoils results."""
POISON_BYTE = 0x7B
"""The same for bytes of states: floats of 16 and 32 bits are large and finite."""


@dataclass
class Sequence:
    """One sequence: its tokens, its row, and how many of its tokens the cache holds."""

    row: int
    token_ids: list[int]
    num_cached: int = 0
    adapter_slot: int = 0
    block_ids: list[int] = field(default_factory=list)


class PagedRunner:
    """Owns a cache and a block table, and computes chunks of sequences.

    Blocks and rows are handed out in random order, so that nothing is contiguous by luck.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks=64,
        block_size=4,
        num_rows=16,
        device="cpu",
        cache_dtype=None,
        seed=0,
    ):
        dtype = cache_dtype or model.dtype
        self.kv_caches = [
            _states(spec, num_rows, device)
            if isinstance(spec, StateSpec)
            else spec.allocate(num_blocks, block_size, dtype=dtype, device=torch.device(device))
            for spec in model.cache_specs()
        ]
        for cache in self.kv_caches:
            for tensor in cache.tensors().values():
                is_state = tensor.dtype == torch.uint8
                poison = POISON_BYTE if is_state else torch.finfo(tensor.dtype).max
                tensor.fill_(min(POISON, poison))
        self.model = model
        self.device = device
        self.block_size = block_size
        self.block_table = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        order = random.Random(seed)
        self._free_blocks = order.sample(range(1, num_blocks), num_blocks - 1)
        self._free_rows = order.sample(range(num_rows), num_rows)
        self._state_pages = [
            _scattered_pages(cache, num_rows, order) if isinstance(cache, StateCacheData) else None
            for cache in self.kv_caches
        ]

    def add(self, token_ids: list[int], adapter_slot: int = 0) -> Sequence:
        """Takes a row for a new sequence of which nothing is computed yet."""
        return Sequence(self._free_rows.pop(), list(token_ids), adapter_slot=adapter_slot)

    def step(self, chunks: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Computes the next n tokens of each sequence in one forward pass.

        Returns each chunk's logits, [n, vocab].
        """
        for sequence, num_tokens in chunks:
            self._grow(sequence, sequence.num_cached + num_tokens)
        input_ids, context = self.prepare(chunks)
        with forward_context(context), torch.inference_mode():
            hidden = self.model(input_ids, context.context.positions)
            slots = context.adapter_slots
            given = () if slots is None else (slots,)
            logits = self.model.compute_logits(hidden, *given)
        for sequence, num_tokens in chunks:
            sequence.num_cached += num_tokens
        return list(logits.split([num_tokens for _, num_tokens in chunks]))

    def run(self, sequence: Sequence, chunk_size: int) -> torch.Tensor:
        """Computes a whole sequence alone, in chunks; returns its logits, [length, vocab]."""
        pieces = []
        while remaining := len(sequence.token_ids) - sequence.num_cached:
            pieces += self.step([(sequence, min(chunk_size, remaining))])
        return torch.cat(pieces)

    def prepare(self, chunks: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, ForwardContext]:
        """Returns the input ids and the forward context of a step."""
        lengths = [num_tokens for _, num_tokens in chunks]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        spans = [range(s.num_cached, s.num_cached + n) for s, n in chunks]
        token_ids = [
            s.token_ids[i] for (s, _), span in zip(chunks, spans, strict=True) for i in span
        ]
        positions = self._tensor([i for span in spans for i in span], torch.int64)
        seq_lens = [span.stop for span in spans]
        metadata = build_attention_metadata(
            query_start_loc=self._tensor(starts),
            seq_lens=self._tensor(seq_lens),
            row_ids=self._tensor([s.row for s, _ in chunks]),
            block_table=self.block_table,
            positions=positions,
            token_request=self._tensor([r for r, n in enumerate(lengths) for _ in range(n)]),
            block_size=self.block_size,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(seq_lens),
        )
        shape = Context(
            positions=positions,
            is_prefill=max(lengths) > 1,
            batch_size=len(chunks),
            num_tokens=starts[-1],
            max_q_len=max(lengths),
        )
        adapter_slots = [s.adapter_slot for s, n in chunks for _ in range(n)]
        has_adapters = getattr(self.model, "num_adapter_slots", 0) > 0  # models of tests have none
        context = ForwardContext(
            context=shape,
            adapter_slots=self._tensor(adapter_slots) if has_adapters else None,
            attn_metadata=metadata,
            kv_cache_data=self.kv_caches,
            layer_attn_metadata=tuple(
                metadata
                if pages is None
                else replace(metadata, block_tables=pages.to(self.device)[metadata.row_ids])
                for pages in self._state_pages
            ),
        )
        return self._tensor(token_ids), context

    def cached(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a sequence's cached keys and values of one layer, each [n, Hk, D]."""
        slots = [
            sequence.block_ids[i // self.block_size] * self.block_size + i % self.block_size
            for i in range(sequence.num_cached)
        ]
        cache = self.kv_caches[layer]
        return cache.k.flatten(0, 1)[slots], cache.v.flatten(0, 1)[slots]

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.block_ids) * self.block_size < num_tokens:
            self.block_table[sequence.row, len(sequence.block_ids)] = self._free_blocks[-1]
            sequence.block_ids.append(self._free_blocks.pop())

    def _tensor(self, values: list[int], dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _states(spec: StateSpec, num_rows: int, device: str) -> StateCacheData:
    """Returns memory for a state of each row, in blocks that hold a few rows of one."""
    unit_bytes = 3 * max(spec.row_bytes, 4 * spec.conv_dtype.itemsize) + 4
    num_blocks = 1 + num_rows * spec.num_units(unit_bytes)
    memory = torch.empty(2, num_blocks, unit_bytes, dtype=torch.uint8, device=device)
    return StateCacheData(memory=memory, spec=spec)


def _scattered_pages(cache: StateCacheData, num_rows: int, order: random.Random) -> torch.Tensor:
    """Returns each row's pages, [rows, P] int32, none of them the null block."""
    blocks = range(1, cache.num_blocks)
    pages = order.sample(blocks, num_rows * cache.num_pages)
    return torch.tensor(pages, dtype=torch.int32).view(num_rows, cache.num_pages)
