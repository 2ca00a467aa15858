"""The worker's tables and the inputs of one step, at constant addresses.

Everything is allocated once, at its largest; steps write into it and use slices, because a captured
graph reads fixed addresses. One small copy per step brings the header to the device; the rest is
gathered from the tables there.

One more row than requests, the dummy row, owns no block. Requests that fill a step up to the size
of a graph use it, so they write to the null block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.forward_context import DPMetadata, GraphKey, PromptChunk
from models.ops.elementwise.table_entries import write_entries
from models.ops.sampling.step_tokens import last_tokens
from services.engine.batch import RowAssignment, read_int32
from services.engine.limits import StepLimits
from services.engine.worker.inputs.adapter_slots import AdapterSlots
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import Int32Array
from services.engine.worker.inputs.drafts import Drafts
from services.engine.worker.inputs.prefix_plan import PrefixBuffers
from services.engine.worker.inputs.transfer import overwrite, to_device

MAX_MADE_SLICES = 1024
"""Cached views of the header, by size; steps repeat the same few."""
_CARRIED = -1
"""Marks in a header a sequence whose length the device knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Slices of the header for a step of R requests, S of which sample.

    query_start_loc: [R + 1] int32. seq_lens, row_ids: [R] int32. sample_indices: [S] int32.
    append_positions: [R] int32, where a request's sampled token goes in its row; for a request
        that does not sample, the last column. Not for steps with drafts.
    num_drafts: [R] int32, the request's last query tokens that are drafts.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    row_ids: Tensor
    sample_indices: Tensor
    append_positions: Tensor
    num_drafts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs(Header):
    """A step's header and all else that a forward pass reads of its T query tokens.

    input_ids: [T] int32. positions, token_request: [T] int64.
    max_seqlen_q, max_seqlen_k: bounds of queries and sequences, in tokens.
    is_prefill: a request may compute prompt tokens.
    chunks: requests with several query tokens; empty where the host does not know them.
    """

    input_ids: Tensor
    positions: Tensor
    token_request: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    is_prefill: bool
    chunks: tuple[PromptChunk, ...] = ()


class InputBuffers:
    """Tables of rows, and the buffers that a step's inputs are written to.

    tokens: [max_num_seqs + 1, max_model_len + 1] int32, each row's tokens by position. The last
        column takes tokens without a position, such as one past a full sequence; nothing reads it.
    block_table: [max_num_seqs + 1, block_table_width] int32, each row's block ids, padded with 0.
    row_lengths: [max_num_seqs] int32, tokens of each row after the last step that sampled there;
        kept with drafts, whose acceptance the host learns later.
    dummy_row: the last row of both tables, which no request owns.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._device = device
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        requests = rows + limits.max_padding_requests

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.dummy_row = rows
        self.tokens = zeros(rows + 1, limits.max_model_len + 1)
        # Different tokens, or a graph that reads the wrong ones would pass its test.
        torch.arange(limits.max_model_len + 1, out=self.tokens[self.dummy_row])
        self.tokens[self.dummy_row].remainder_(limits.vocab_size)
        self.block_table = zeros(rows + 1, limits.block_table_width)
        self.row_lengths = zeros(rows)
        # The parts of a header are adjacent: one copy a step.
        num_dp, end = limits.data_parallel_size, 6 * requests + 1
        # Kernels read both counts at addresses of the same alignment: one build does for both.
        width = -(-num_dp // 4) * 4 if num_dp > 1 else 0
        self._header = zeros(end + 2 * width)
        self.adapters: AdapterSlots | None = None
        """Slots of the step's adapters; None of a model without room for some."""
        if limits.num_adapter_slots:
            self.adapters = AdapterSlots(rows + 1, tokens, device)
        self.prefixes: PrefixBuffers | None = None
        """Leading keys that the step's requests share; None where none are shared."""
        if limits.shared_prefix_tokens:
            self.prefixes = PrefixBuffers(requests, device, num_queries=limits.decode_q_len)
        self._offsets = (0, *(part * requests + 1 for part in range(1, 6)))
        self.dp_metadata: DPMetadata | None = None
        """The tokens of each data-parallel rank, a part of the header; None where there is one."""
        self.draft_dp_metadata: DPMetadata | None = None
        """The same in draft passes of one token of each request that samples."""
        self._across_dp = [slice(first, first + num_dp) for first in (end, end + width)]
        if num_dp > 1:
            counts = [self._header[each] for each in self._across_dp]
            self.dp_metadata, self.draft_dp_metadata = (
                DPMetadata(num_tokens_across_dp=each, num_sampling_across_dp=counts[1])
                for each in counts
            )
        self._last_column = self._max_model_len = limits.max_model_len
        self._max_padding_requests = limits.max_padding_requests
        self._made_slices: dict[tuple[int, int], Header] = {}
        self._input_ids = zeros(tokens)
        self._positions = zeros(tokens, dtype=torch.int64)
        self._token_request = zeros(tokens, dtype=torch.int64)
        self._token_index = torch.arange(tokens, dtype=torch.int32, device=device)
        self._request_index = torch.arange(requests, dtype=torch.int64, device=device)

    def write_tables(
        self, assignments: Sequence[RowAssignment], block_writes: Int32Array | None
    ) -> None:
        """Gives rows to new requests and overwrites entries of the block table.

        Args:
            assignments: rows, with the requests' tokens; they start without blocks.
            block_writes: [2, n], indices and block ids; None for no change.
        """
        for assignment in assignments:
            token_ids = read_int32(assignment.token_ids)
            overwrite(self.tokens[assignment.row, : len(token_ids)], token_ids)
            self.block_table[assignment.row].zero_()
        if self.adapters is not None:
            self.adapters.assign(assignments)
        if block_writes is not None:
            write_entries(self.block_table, to_device(block_writes, self._device))

    def write(self, batch: Batch, key: GraphKey | None = None) -> Header:
        """Writes a step's tables, drafts and header.

        Dummy requests fill the header up to the size of a whole graph.

        Args:
            batch: the step.
            key: the graph that reads the header, if any.

        Returns:
            The header without the dummies, which come last.
        """
        self.write_tables(batch.assignments, batch.block_writes)
        if batch.drafts is not None:
            entries = batch.drafts.entries(self.tokens.shape[1])
            if entries.size:
                write_entries(self.tokens, to_device(entries, self._device))
        last_tokens = batch.last_token_entries(self.tokens.shape[1])
        if last_tokens is not None and last_tokens.size:
            write_entries(self.tokens, to_device(last_tokens, self._device))
        arrays = batch.query_start_loc, batch.seq_lens, batch.row_ids
        if key is not None and key.kind is GraphKind.DECODE:
            if key.graph_bs > len(batch.row_ids):
                arrays = self._filled_with_decodes(batch, key)
        elif key is not None and key.kind is GraphKind.MIXED:
            arrays = self._filled_with_prompts(batch, key)
        if self.adapters is not None:
            self.adapters.write(batch, key)
        if self.prefixes is not None:
            self.prefixes.write(batch.prefixes, key)
        drafts = batch.drafts
        across_dp = batch.num_tokens_across_dp, batch.num_sampling_across_dp
        self._write_header(*arrays, batch.sample_indices, drafts, across_dp)
        header = self.header(len(batch.row_ids), len(batch.sample_indices))
        if drafts is not None and len(drafts.carried):
            self._carry_lengths(header)
        return header

    def header(self, num_requests: int, num_sampling: int = 0) -> Header:
        """Returns views of the header, cached because making them takes 10 us."""
        sizes = num_requests, num_sampling
        header = self._made_slices.get(sizes)
        if header is None:
            if len(self._made_slices) >= MAX_MADE_SLICES:
                self._made_slices.clear()
            header = self._made_slices[sizes] = self._slice_header(*sizes)
        return header

    def num_requests(self, key: GraphKey) -> int:
        """Returns the requests of a whole graph, dummies included."""
        is_mixed = key.kind is GraphKind.MIXED
        return key.graph_bs + self._max_padding_requests if is_mixed else key.graph_bs

    def fixed(self, key: GraphKey) -> dict[str, Tensor]:
        """Returns the tensors that a whole graph reads, by name."""
        header = self.header(self.num_requests(key))
        others = {}
        if self.prefixes is not None and key.shares_prefixes:
            others["prefixes"] = self.prefixes.memory
        if self.dp_metadata is not None:
            others["across_dp"] = self._header[self._across_dp[0].start :]
        return {
            **others,
            "query_start_loc": header.query_start_loc,
            "seq_lens": header.seq_lens,
            "row_ids": header.row_ids,
            "append_positions": header.append_positions,
            "tokens": self.tokens,
            "block_table": self.block_table,
        }

    def gather_batch(self, batch: Batch, *, num_tokens: int | None = None) -> Inputs:
        """Gathers the input tokens of a step whose header was written.

        Args:
            batch: the step.
            num_tokens: pads input_ids and positions to the size of a graph, with arbitrary tokens.
        """
        if self.prefixes is not None:  # an ordered graph that cannot run may have read none
            self.prefixes.write(batch.prefixes)
        inputs = self.gather(
            self.header(len(batch.row_ids), len(batch.sample_indices)),
            batch.num_tokens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            is_prefill=batch.is_prefill,
        )
        inputs = replace(inputs, chunks=batch.chunks)
        return inputs if num_tokens is None else self.padded(inputs, num_tokens)

    def padded(self, inputs: Inputs, num_tokens: int) -> Inputs:
        """Returns gathered inputs with input_ids and positions of `num_tokens` tokens."""
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        return replace(inputs, input_ids=input_ids, positions=positions)

    def gather(
        self,
        header: Header,
        num_tokens: int,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        is_prefill: bool = False,
        lengths_vary: bool = False,
    ) -> Inputs:
        """Gathers the input tokens of a step whose header is on the device.

        Args:
            header: the step's.
            num_tokens: its query tokens.
            max_seqlen_q: bound of its queries, in tokens.
            max_seqlen_k: bound of its sequences, in tokens.
            is_prefill: a request may compute prompt tokens.
            lengths_vary: with as many requests as tokens, some may have none and others several.
        """
        seq_lens, row_ids = header.seq_lens, header.row_ids
        num_requests = len(row_ids)
        input_ids = self._input_ids[:num_tokens]
        positions = self._positions[:num_tokens]
        if num_tokens == num_requests and not lengths_vary:
            token_request = self._request_index[:num_requests]
            last_tokens(self.tokens, row_ids, seq_lens, input_ids=input_ids, positions=positions)
        else:
            token_request = self._token_request[:num_tokens]
            index = self._token_index[:num_tokens]
            ends = header.query_start_loc[1:]
            torch.searchsorted(ends, index, right=True, out=token_request)
            # Counted from its request's end, token t is at seq_len - (end of the queries - t).
            from_end = seq_lens - ends
            torch.add(from_end.index_select(0, token_request), index, out=positions)
            token_rows = row_ids.index_select(0, token_request)
            input_ids.copy_(self.tokens[token_rows, positions])
        return Inputs(
            query_start_loc=header.query_start_loc,
            seq_lens=seq_lens,
            row_ids=row_ids,
            sample_indices=header.sample_indices,
            append_positions=header.append_positions,
            num_drafts=header.num_drafts,
            input_ids=input_ids,
            positions=positions,
            token_request=token_request,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            is_prefill=is_prefill,
        )

    @property
    def model_inputs(self) -> tuple[Tensor, Tensor]:
        """The memory of input_ids and positions, [max_num_batched_tokens] each."""
        return self._input_ids, self._positions

    def append_tokens(self, row_ids: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Writes one sampled token into each of S rows; all are [S] int32."""
        self.tokens.index_put_((row_ids, positions), token_ids)

    def keep_lengths(self, row_ids: Tensor, lengths: Tensor) -> None:
        """Writes how many tokens each of S rows has; both are [S] int32."""
        self.row_lengths.index_put_((row_ids,), lengths)

    def _write_header(
        self,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        row_ids: Int32Array,
        sample_indices: Int32Array,
        drafts: Drafts | None,
        across_dp: tuple[Int32Array | None, Int32Array | None],
    ) -> None:
        is_shared = self._device.type == "cpu"
        # A fresh pinned buffer each time: the previous step's copy may still be running.
        host = (
            self._header
            if is_shared
            else torch.empty_like(self._header, device="cpu", pin_memory=True)
        )
        view = host.numpy()
        append_positions = np.full(len(row_ids), self._last_column, np.int32)
        append_positions[sample_indices] = seq_lens[sample_indices]
        num_drafts = np.zeros(len(row_ids), np.int32)
        if drafts is not None:
            num_drafts[: len(drafts.counts)] = drafts.counts
        parts = query_start_loc, seq_lens, row_ids, sample_indices, append_positions, num_drafts
        for offset, part in zip(self._offsets, parts, strict=True):
            view[offset : offset + len(part)] = part
        if drafts is not None:
            view[self._offsets[1] + drafts.carried] = _CARRIED
        if self.dp_metadata is not None:
            # Other ranks do the same in a step of this rank alone: every row counts.
            num_rows = len(self._input_ids)
            for where, counts in zip(self._across_dp, across_dp, strict=True):
                view[where] = num_rows if counts is None else counts
        if not is_shared:
            self._header.copy_(host, non_blocking=True)

    def _slice_header(self, num_requests: int, num_sampling: int) -> Header:
        requests = num_requests
        lengths = (requests + 1, requests, requests, num_sampling, requests, requests)
        query_start_loc, seq_lens, row_ids, sample_indices, append_positions, num_drafts = (
            self._header[offset : offset + length]
            for offset, length in zip(self._offsets, lengths, strict=True)
        )
        return Header(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            row_ids=row_ids,
            sample_indices=sample_indices,
            append_positions=append_positions,
            num_drafts=num_drafts,
        )

    def _carry_lengths(self, header: Header) -> None:
        """Writes the sequence lengths of carried requests, which only the device knows."""
        seq_lens = header.seq_lens
        carried = self.row_lengths.index_select(0, header.row_ids) + header.num_drafts
        seq_lens.copy_(torch.where(seq_lens == _CARRIED, carried, seq_lens))

    def _filled_with_decodes(
        self, batch: Batch, key: GraphKey
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Appends dummies with as many query tokens as the step's requests."""
        ones = np.ones(key.graph_bs - len(batch.row_ids), np.int32)
        return (
            np.arange(key.graph_bs + 1, dtype=np.int32) * key.max_q_len,
            np.concatenate([batch.seq_lens, ones * key.max_q_len]),
            np.concatenate([batch.row_ids, ones * self.dummy_row]),
        )

    def _filled_with_prompts(
        self, batch: Batch, key: GraphKey
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Appends dummies that take the graph's padding; dummies without a token come last."""
        missing = key.num_tokens - batch.num_tokens
        num_dummies = self.num_requests(key) - len(batch.row_ids)
        ends = np.minimum(np.arange(1, num_dummies + 1) * self._max_model_len, missing)
        assert ends[-1] == missing, "dummies have room for the padding"
        return (
            np.concatenate([batch.query_start_loc, batch.num_tokens + ends]),
            np.concatenate([batch.seq_lens, np.diff(ends, prepend=0).astype(np.int32)]),
            np.concatenate([batch.row_ids, np.full(num_dummies, self.dummy_row)]),
        )
