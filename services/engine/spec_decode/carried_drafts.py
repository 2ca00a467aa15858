"""The lengths and drafts of rows, learned from results, as the worker has them.

A step may be ordered before the result of the one that made its drafts. Its descriptor then leaves
out what only the worker knows. Once its own result is back, the descriptor is completed: a step
that is watched, recorded or counted names its drafts and lengths, however it was ordered.
"""

import numpy as np

from services.engine.batch import BatchDescriptor, StepResult, pack_int32, read_int32


class CarriedDrafts:
    """The tokens and drafts of each row, after the steps whose results were taken."""

    def __init__(self, *, max_num_seqs: int, num_drafts: int) -> None:
        """Starts without results.

        Args:
            max_num_seqs: rows.
            num_drafts: drafts of each request in a result.
        """
        self._lengths = np.zeros(max_num_seqs, np.int32)
        self._token_ids = np.zeros((max_num_seqs, num_drafts), np.int32)

    def complete(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Completes the descriptor of a step whose result is back, and takes the result.

        Steps come in their order.
        """
        metadata, attention = descriptor.spec_decode_metadata, descriptor.attn_metadata
        counts = read_int32(metadata.num_draft_tokens)
        rows, seq_lens = read_int32(attention.row_ids), read_int32(attention.seq_lens)
        if metadata.carried_requests:
            carried = read_int32(metadata.carried_requests)
            seq_lens = seq_lens.copy()
            seq_lens[carried] = self._lengths[rows[carried]] + counts[carried]
            attention.seq_lens = pack_int32(seq_lens)
            attention.max_seqlen_k = int(seq_lens.max())
            token_ids = self._named(metadata.draft_token_ids, counts, rows, carried)
            metadata.draft_token_ids = pack_int32(token_ids)
            metadata.ClearField("carried_requests")
        sampling = read_int32(descriptor.sampling.sample_indices)
        accepted = read_int32(result.num_accepted_tokens)
        self._lengths[rows[sampling]] = seq_lens[sampling] - counts[sampling] + accepted + 1
        made = read_int32(result.draft_token_ids).reshape(-1, self._token_ids.shape[1])
        self._token_ids[rows[sampling]] = made

    def _named(
        self,
        named: bytes,
        counts: np.typing.NDArray[np.int32],
        rows: np.typing.NDArray[np.int32],
        carried: np.typing.NDArray[np.int32],
    ) -> np.typing.NDArray[np.int32]:
        """Returns the drafts of a step, request after request.

        Args:
            named: drafts of the requests that are not carried.
            counts: [R], drafts of each request.
            rows: [R].
            carried: [C], indices of carried requests.
        """
        columns = np.arange(self._token_ids.shape[1])
        is_carried = np.zeros(len(counts), bool)
        is_carried[carried] = True
        drafts = np.zeros((len(counts), len(columns)), np.int32)
        drafts[carried] = self._token_ids[rows[carried]]
        is_draft = columns < counts[:, None]
        drafts[is_draft & ~is_carried[:, None]] = read_int32(named)
        token_ids: np.typing.NDArray[np.int32] = drafts[is_draft]
        return token_ids
