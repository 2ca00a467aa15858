"""The worker's tables and the inputs of one step, at addresses that never change.

Everything is allocated once, at its largest; a step only writes into it and hands out slices, as a
captured graph reads the addresses that it was captured with. One small copy per step brings the
header to the device; the rest is gathered from the tables there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch import RowAssignment, read_int32
from services.engine.worker.step_arrays import BlockWrites, Int32Array, StepArrays, StepLimits
from services.engine.worker.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Slices of the buffers for a step of R requests and T query tokens, S of which sample.

    input_ids: [T] int32. positions, token_request: [T] int64.
    query_start_loc: [R + 1] int32. seq_lens, row_ids: [R] int32. sample_indices: [S] int32.
    """

    input_ids: Tensor
    positions: Tensor
    token_request: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    row_ids: Tensor
    sample_indices: Tensor


class InputBuffers:
    """Tables of rows, and the buffers that a step's inputs are written to.

    tokens: [max_num_seqs, max_model_len + 1] int32, each row's tokens by position. The last column
        takes the token sampled behind a full sequence; nothing reads it.
    block_table: [max_num_seqs, max_blocks_per_seq] int32, each row's block ids, padded with 0.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._device = device
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(rows, limits.max_model_len + 1)
        self.block_table = zeros(rows, limits.max_blocks_per_seq)
        # query_start_loc, seq_lens, row_ids and sample_indices lie side by side: one copy a step.
        self._header = zeros(4 * rows + 1)
        self._offsets = (0, rows + 1, 2 * rows + 1, 3 * rows + 1)
        self._input_ids = zeros(tokens)
        self._positions = zeros(tokens, dtype=torch.int64)
        self._token_request = zeros(tokens, dtype=torch.int64)
        self._token_index = torch.arange(tokens, dtype=torch.int32, device=device)
        self._request_index = torch.arange(rows, dtype=torch.int64, device=device)

    def assign_rows(self, assignments: Sequence[RowAssignment]) -> None:
        """Gives rows to new requests: their tokens so far, and no blocks."""
        for assignment in assignments:
            # The bytes of a message are read-only, which torch does not accept.
            token_ids = read_int32(assignment.token_ids).copy()
            self.tokens[assignment.row, : len(token_ids)] = to_device(token_ids, self._device)
            self.block_table[assignment.row].zero_()

    def write_blocks(self, writes: BlockWrites) -> None:
        """Overwrites entries of the block table."""
        indices = to_device(writes.indices, self._device)
        block_ids = to_device(writes.block_ids, self._device)
        self.block_table.view(-1).index_copy_(0, indices, block_ids.int())

    def write_step(self, arrays: StepArrays) -> StepInputs:
        """Brings a step's arrays to the device and gathers its input tokens there."""
        header = self._write_header(
            (arrays.query_start_loc, arrays.seq_lens, arrays.row_ids, arrays.sample_indices)
        )
        query_start_loc, seq_lens, row_ids, sample_indices = header
        num_requests, num_tokens = len(arrays.seq_lens), arrays.num_tokens
        input_ids = self._input_ids[:num_tokens]
        positions = self._positions[:num_tokens]
        if num_tokens == num_requests:
            token_request = self._request_index[:num_requests]
            torch.sub(seq_lens, 1, out=positions)
            token_rows = row_ids
        else:
            token_request = self._token_request[:num_tokens]
            index = self._token_index[:num_tokens]
            torch.searchsorted(query_start_loc[1:], index, right=True, out=token_request)
            # Counted from its request's end, token t is at seq_len - (end of the queries - t).
            behind_end = seq_lens - query_start_loc[1:]
            torch.add(behind_end.index_select(0, token_request), index, out=positions)
            token_rows = row_ids.index_select(0, token_request)
        input_ids.copy_(self.tokens[token_rows, positions])
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            token_request=token_request,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            row_ids=row_ids,
            sample_indices=sample_indices,
        )

    def append_tokens(self, row_ids: Tensor, seq_lens: Tensor, token_ids: Tensor) -> None:
        """Writes one sampled token behind each of S sequences; all are [S] int32."""
        self.tokens.index_put_((row_ids, seq_lens), token_ids)

    def _write_header(self, arrays: Sequence[Int32Array]) -> list[Tensor]:
        """Writes the arrays to their fixed places; returns their slices on the device."""
        is_shared = self._device.type == "cpu"
        # A fresh pinned buffer each time: the copy of the step before may still be under way.
        host = (
            self._header
            if is_shared
            else torch.zeros_like(self._header, device="cpu", pin_memory=True)
        )
        view = host.numpy()
        for offset, array in zip(self._offsets, arrays, strict=True):
            view[offset : offset + len(array)] = array
        if not is_shared:
            self._header.copy_(host, non_blocking=True)
        return [
            self._header[offset : offset + len(array)]
            for offset, array in zip(self._offsets, arrays, strict=True)
        ]
