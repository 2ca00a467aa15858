"""The drafts of a step, viewed and checked."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.batch import SpecDecodeMetadata, read_int32
from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.inputs.checks import Int32Array, is_below, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts of the S requests that sample, at most k of each.

    A request samples k + 1 tokens: after its last query token that is no draft, and after each
    draft. A request with fewer drafts repeats its last query token.

    counts: [R], drafts of each request of the step; 0 for one that does not sample.
    token_ids: [S, k], padded with NO_DRAFT; carried requests have their drafts in their rows.
    token_indices: [S, k + 1], the query tokens after which the step samples.
    row_ids: [S, k + 1]. positions: [S, k + 1], of the sampled tokens in their rows; of carried
        requests the last that is possible.
    num_next: drafts to make for each request.
    carried: [C], indices of the requests whose length and drafts their rows know, ascending.
    is_carried: [S], whether a request is one of them.
    """

    counts: Int32Array
    token_ids: Int32Array
    token_indices: Int32Array
    row_ids: Int32Array
    positions: Int32Array
    num_next: int
    carried: Int32Array
    is_carried: npt.NDArray[np.bool_]

    @classmethod
    def read(
        cls,
        metadata: SpecDecodeMetadata,
        *,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        row_ids: Int32Array,
        sample_indices: Int32Array,
        vocab_size: int,
    ) -> "Drafts":
        """Arranges a step's drafts.

        Args:
            metadata: the drafts.
            query_start_loc: [R + 1], of the step, like the other arrays.
            seq_lens: [R].
            row_ids: [R].
            sample_indices: [S].
            vocab_size: upper bound of drafts.

        Raises:
            ValueError: the drafts contradict the step.
        """
        counts = read_int32(metadata.num_draft_tokens)
        token_ids = read_int32(metadata.draft_token_ids)
        num_steps, num_sampling = metadata.num_spec_steps, len(sample_indices)
        q_lens = np.diff(query_start_loc)
        require(len(counts) == len(seq_lens), "a request without its number of drafts")
        is_carried = _carried(metadata, counts, q_lens)
        require(len(token_ids) == counts[~is_carried].sum(), "drafts missing or left over")
        require(
            not is_carried.any() or is_carried[sample_indices].sum() == is_carried.sum(),
            "a carried request that does not sample",
        )
        require(
            bool(((counts >= 0) & (counts <= num_steps) & (counts < q_lens)).all()),
            "more drafts than query tokens or than num_spec_steps",
        )
        require(metadata.num_next_drafts <= num_steps, "more next drafts than num_spec_steps")
        require(counts[sample_indices].sum() == counts.sum(), "drafts that are not verified")
        require(
            not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < vocab_size,
            "a draft outside the vocabulary",
        )
        sampled, is_carried = counts[sample_indices][:, None], is_carried[sample_indices]
        columns = np.arange(num_steps + 1, dtype=np.int32)
        padded = np.full((num_sampling, num_steps), NO_DRAFT, np.int32)
        padded[(columns[:-1] < sampled) & ~is_carried[:, None]] = token_ids
        from_end = np.minimum(columns, sampled) - sampled
        return cls(
            counts=counts,
            token_ids=padded,
            token_indices=query_start_loc[sample_indices + 1][:, None] - 1 + from_end,
            row_ids=np.repeat(row_ids[sample_indices][:, None], num_steps + 1, axis=1),
            positions=seq_lens[sample_indices][:, None] + from_end,
            num_next=metadata.num_next_drafts,
            carried=read_int32(metadata.carried_requests),
            is_carried=is_carried,
        )

    @property
    def least_positions(self) -> Int32Array:
        """The first positions that the sampled tokens can have, [S, k + 1].

        At most k drafts of a carried request are in flight, and all may be rejected.
        """
        return self.positions - self.is_carried[:, None] * np.int32(self.token_ids.shape[1])

    def entries(self, row_length: int) -> Int32Array:
        """Returns named drafts as writes to the table of tokens: [2, D], indices and values."""
        is_draft = self.token_ids != NO_DRAFT
        rows, positions = self.row_ids[:, :-1][is_draft], self.positions[:, :-1][is_draft]
        return np.stack([rows * row_length + positions, self.token_ids[is_draft]])


def _carried(
    metadata: SpecDecodeMetadata, counts: Int32Array, q_lens: Int32Array
) -> npt.NDArray[np.bool_]:
    """Returns whether each request of a step is carried, [R].

    Raises:
        ValueError: the metadata contradicts the step.
    """
    is_carried = np.zeros(len(counts), bool)
    carried = read_int32(metadata.carried_requests)
    if len(carried):
        require(bool((carried[1:] > carried[:-1]).all()), "carried requests that do not ascend")
        require(is_below(carried, len(counts)), "a carried request out of the batch")
        is_carried[carried] = True
        require(
            bool((q_lens[is_carried] == counts[is_carried] + 1).all()),
            "a carried request with other tokens than its newest and its drafts",
        )
    return is_carried
