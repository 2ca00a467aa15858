"""The drafts of a step on the host, and the places where something is sampled because of them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.engine.batch import SpecDecodeMetadata, read_int32
from services.engine.spec_decode.verification import NO_DRAFT

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """Drafts of the S requests that sample, k at most of each.

    Each is sampled for at k + 1 places: behind its last query token that is no draft and behind
    each draft. Where there are fewer, the last place stands for the rest.

    token_ids: [S, k], padded with NO_DRAFT.
    places: [S, k + 1], query tokens, by their number in the step.
    row_ids: [S, k + 1]. positions: [S, k + 1], where in its row the token goes.
    """

    token_ids: Int32Array
    places: Int32Array
    row_ids: Int32Array
    positions: Int32Array

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
    ) -> "StepDrafts":
        """Lays a step's drafts out.

        Args:
            metadata: the drafts.
            query_start_loc: [R + 1], of the step, as all that follow.
            seq_lens: [R].
            row_ids: [R].
            sample_indices: [S].
            vocab_size: drafts are below it.

        Raises:
            ValueError: they contradict the step.
        """
        counts = read_int32(metadata.num_draft_tokens)
        token_ids = read_int32(metadata.draft_token_ids)
        num_steps, num_sampling = metadata.num_spec_steps, len(sample_indices)
        q_lens = np.diff(query_start_loc)
        _require(len(counts) == len(seq_lens), "a request without its number of drafts")
        _require(len(token_ids) == counts.sum(), "drafts missing or left over")
        _require(
            bool(((counts >= 0) & (counts <= num_steps) & (counts < q_lens)).all()),
            "more drafts than query tokens or than num_spec_steps",
        )
        _require(counts[sample_indices].sum() == counts.sum(), "drafts that are not verified")
        _require(
            not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < vocab_size,
            "a draft outside the vocabulary",
        )
        counts = counts[sample_indices][:, None]
        columns = np.arange(num_steps + 1, dtype=np.int32)
        padded = np.full((num_sampling, num_steps), NO_DRAFT, np.int32)
        padded[columns[:-1] < counts] = token_ids
        from_end = np.minimum(columns, counts) - counts
        return cls(
            token_ids=padded,
            places=query_start_loc[sample_indices + 1][:, None] - 1 + from_end,
            row_ids=np.repeat(row_ids[sample_indices][:, None], num_steps + 1, axis=1),
            positions=seq_lens[sample_indices][:, None] + from_end,
        )

    def entries(self, row_length: int) -> Int32Array:
        """Returns the drafts as writes to the table of tokens: [2, D], indices and values."""
        is_draft = self.token_ids != NO_DRAFT
        rows, positions = self.row_ids[:, :-1][is_draft], self.positions[:, :-1][is_draft]
        return np.stack([rows * row_length + positions, self.token_ids[is_draft]])


def _require(condition: bool, found: str) -> None:
    """Raises ValueError that names what was found, unless the condition holds."""
    if not condition:
        raise ValueError(f"the step's descriptor is invalid: it has {found}")
