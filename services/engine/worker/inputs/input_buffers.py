"""The worker's tables and the inputs of one step, at addresses that never change.

Everything is allocated once, at its largest; a step only writes into it and hands out slices, as a
captured graph reads the addresses that it was captured with. One small copy per step brings the
header to the device; the rest is gathered from the tables there.

The tables have one row more than there are requests: the dummy row, which owns no block. Requests
that only fill a step up to the size of a graph use it, so that they write to the null block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.ops.elementwise.table_entries import write_entries
from models.ops.sampling.step_tokens import last_tokens
from services.engine.batch import RowAssignment, read_int32
from services.engine.worker.inputs.step_arrays import BlockWrites, StepArrays, StepLimits
from services.engine.worker.inputs.transfer import overwrite, to_device

MAX_MADE_SLICES = 1024
"""Views of the header that are kept, by their sizes; steps repeat the same few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """Slices of the header for a step of R requests, S of which sample.

    query_start_loc: [R + 1] int32. seq_lens, row_ids: [R] int32. sample_indices: [S] int32.
    append_positions: [R] int32, where a request's sampled token goes in its row; for a request
        that does not sample, the last column.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    row_ids: Tensor
    sample_indices: Tensor
    append_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(StepHeader):
    """A step's header and what the model reads of its T query tokens.

    input_ids: [T] int32. positions, token_request: [T] int64.
    """

    input_ids: Tensor
    positions: Tensor
    token_request: Tensor


class InputBuffers:
    """Tables of rows, and the buffers that a step's inputs are written to.

    tokens: [max_num_seqs + 1, max_model_len + 1] int32, each row's tokens by position. The last
        column takes what belongs nowhere, such as a token behind a full sequence; nothing reads it.
    block_table: [max_num_seqs + 1, block_table_width] int32, each row's block ids, padded with 0.
    dummy_row: the last row of both, which no request owns.
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
        # The parts of a header lie side by side: one copy a step.
        self._header = zeros(5 * requests + 1)
        self._offsets = (0, *(part * requests + 1 for part in range(1, 5)))
        self._last_column = self._max_model_len = limits.max_model_len
        self._made_slices: dict[tuple[int, int], StepHeader] = {}
        self._input_ids = zeros(tokens)
        self._positions = zeros(tokens, dtype=torch.int64)
        self._token_request = zeros(tokens, dtype=torch.int64)
        self._token_index = torch.arange(tokens, dtype=torch.int32, device=device)
        self._request_index = torch.arange(requests, dtype=torch.int64, device=device)

    def assign_rows(self, assignments: Sequence[RowAssignment]) -> None:
        """Gives rows to new requests: their tokens so far, and no blocks."""
        for assignment in assignments:
            token_ids = read_int32(assignment.token_ids)
            overwrite(self.tokens[assignment.row, : len(token_ids)], token_ids)
            self.block_table[assignment.row].zero_()

    def write_blocks(self, writes: BlockWrites) -> None:
        """Overwrites entries of the block table."""
        write_entries(self.block_table, to_device(writes.entries, self._device))

    def write_step(self, arrays: StepArrays) -> StepInputs:
        """Brings a step's arrays to the device and gathers its input tokens there."""
        return self.gather(self.write_header(arrays), arrays.num_tokens)

    def write_decodes(self, arrays: StepArrays, graph_bs: int, q_len: int = 1) -> StepHeader:
        """Brings a step of `q_len` tokens a request to the device, filled up with dummy requests.

        Returns:
            The header without the dummies; `decodes` has them.
        """
        missing = graph_bs - len(arrays.row_ids)
        self.write_header(arrays if not missing else self._filled_up(arrays, graph_bs, q_len))
        return self._header_slices(len(arrays.row_ids), len(arrays.sample_indices))

    def write_prompts(self, arrays: StepArrays, num_tokens: int, num_requests: int) -> StepHeader:
        """Brings a step to the device, filled up to so many query tokens with dummy requests.

        Those that find no token to compute stand last.

        Args:
            arrays: the step's.
            num_tokens: of the step and its dummies.
            num_requests: of the step and its dummies, which must have room for the tokens.

        Returns:
            The header without the dummies; `decodes` has them.
        """
        missing = num_tokens - arrays.num_tokens
        num_dummies = num_requests - len(arrays.row_ids)
        ends = np.minimum(np.arange(1, num_dummies + 1) * self._max_model_len, missing)
        assert ends[-1] == missing, "dummies have room for the padding"
        lengths = np.diff(ends, prepend=0).astype(np.int32)
        self.write_header(
            StepArrays(
                query_start_loc=np.concatenate([arrays.query_start_loc, arrays.num_tokens + ends]),
                seq_lens=np.concatenate([arrays.seq_lens, lengths]),
                row_ids=np.concatenate([arrays.row_ids, np.full(num_dummies, self.dummy_row)]),
                sample_indices=arrays.sample_indices,
                num_tokens=num_tokens,
            )
        )
        return self._header_slices(len(arrays.row_ids), len(arrays.sample_indices))

    def decodes(self, graph_bs: int) -> StepHeader:
        """Returns the header of any step of `graph_bs` requests."""
        return self._header_slices(graph_bs, 0)

    def fixed(self, graph_bs: int) -> Mapping[str, Tensor]:
        """Returns what a graph of such steps reads, by name."""
        header = self.decodes(graph_bs)
        return {
            "query_start_loc": header.query_start_loc,
            "seq_lens": header.seq_lens,
            "row_ids": header.row_ids,
            "append_positions": header.append_positions,
            "tokens": self.tokens,
            "block_table": self.block_table,
        }

    def gather(
        self, header: StepHeader, num_tokens: int, *, lengths_vary: bool = False
    ) -> StepInputs:
        """Gathers the input tokens of a step whose header is on the device.

        Args:
            header: the step's.
            num_tokens: its query tokens.
            lengths_vary: whether, with as many requests as tokens, some may have none and others
                several.
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
            behind_end = seq_lens - ends
            torch.add(behind_end.index_select(0, token_request), index, out=positions)
            token_rows = row_ids.index_select(0, token_request)
            input_ids.copy_(self.tokens[token_rows, positions])
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            token_request=token_request,
            query_start_loc=header.query_start_loc,
            seq_lens=seq_lens,
            row_ids=row_ids,
            sample_indices=header.sample_indices,
            append_positions=header.append_positions,
        )

    def padded(self, inputs: StepInputs, num_tokens: int) -> StepInputs:
        """Returns a step's inputs with as many query tokens as a graph has.

        The padding is what earlier steps left there; it belongs to no request.
        """
        return replace(
            inputs, input_ids=self._input_ids[:num_tokens], positions=self._positions[:num_tokens]
        )

    def append_tokens(self, row_ids: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Writes one sampled token into each of S rows; all are [S] int32."""
        self.tokens.index_put_((row_ids, positions), token_ids)

    def write_header(self, arrays: StepArrays) -> StepHeader:
        """Writes a step's arrays to their fixed places on the device."""
        is_shared = self._device.type == "cpu"
        # A fresh pinned buffer each time: the copy of the step before may still be under way.
        host = (
            self._header
            if is_shared
            else torch.empty_like(self._header, device="cpu", pin_memory=True)
        )
        view = host.numpy()
        append_positions = np.full(len(arrays.row_ids), self._last_column, np.int32)
        append_positions[arrays.sample_indices] = arrays.seq_lens[arrays.sample_indices]
        parts = (
            arrays.query_start_loc,
            arrays.seq_lens,
            arrays.row_ids,
            arrays.sample_indices,
            append_positions,
        )
        for offset, part in zip(self._offsets, parts, strict=True):
            view[offset : offset + len(part)] = part
        if not is_shared:
            self._header.copy_(host, non_blocking=True)
        return self._header_slices(len(arrays.row_ids), len(arrays.sample_indices))

    def _header_slices(self, num_requests: int, num_sampling: int) -> StepHeader:
        """Returns views of the header; they take 10 us to make, so a step finds them made."""
        sizes = num_requests, num_sampling
        header = self._made_slices.get(sizes)
        if header is None:
            if len(self._made_slices) >= MAX_MADE_SLICES:
                self._made_slices.clear()
            header = self._made_slices[sizes] = self._slice_header(*sizes)
        return header

    def _slice_header(self, num_requests: int, num_sampling: int) -> StepHeader:
        lengths = (num_requests + 1, num_requests, num_requests, num_sampling, num_requests)
        query_start_loc, seq_lens, row_ids, sample_indices, append_positions = (
            self._header[offset : offset + length]
            for offset, length in zip(self._offsets, lengths, strict=True)
        )
        return StepHeader(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            row_ids=row_ids,
            sample_indices=sample_indices,
            append_positions=append_positions,
        )

    def _filled_up(self, arrays: StepArrays, graph_bs: int, q_len: int) -> StepArrays:
        """Appends dummy requests to a step, with as many tokens as each of its requests."""
        ones = np.ones(graph_bs - len(arrays.row_ids), np.int32)
        return StepArrays(
            query_start_loc=np.arange(graph_bs + 1, dtype=np.int32) * q_len,
            seq_lens=np.concatenate([arrays.seq_lens, ones * q_len]),
            row_ids=np.concatenate([arrays.row_ids, ones * self.dummy_row]),
            sample_indices=arrays.sample_indices,
            num_tokens=graph_bs * q_len,
        )
