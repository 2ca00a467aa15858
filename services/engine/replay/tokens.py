"""Tokens and drafts of a step: of the recording and both sides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.engine.batch import StepResult, read_int32, read_tokens
from services.engine.replay.recording import ReplayError
from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens of each row that sampled, and its next drafts.

    tokens: one of each row; with drafts, the accepted ones and the next. drafts: k of each, none
    without speculative decoding.
    """

    tokens: list[list[int]]
    drafts: list[list[int]]

    @classmethod
    def read(cls, result: StepResult, num_drafts: int) -> "StepTokens":
        """Reads a result."""
        tokens = read_tokens(result)
        if not num_drafts:
            return cls(tokens=tokens, drafts=[[] for _ in tokens])
        drafts = read_int32(result.draft_token_ids).tolist()
        starts = range(0, len(drafts), num_drafts)
        return cls(tokens=tokens, drafts=[drafts[start : start + num_drafts] for start in starts])

    @classmethod
    def recorded(cls, result: StepResult, batch: Batch, num_drafts: int) -> "StepTokens":
        """Reads a recorded result.

        Raises:
            ReplayError: it does not belong to the step.
        """
        tokens = cls.read(result, num_drafts)
        num_verified = [0] * len(batch.sample_indices)
        if batch.drafts is not None:
            num_verified = (batch.drafts.token_ids != NO_DRAFT).sum(axis=1).tolist()
        num_found = len(read_int32(result.token_ids))
        is_whole = num_found == sum(len(each) for each in tokens.tokens)
        if not is_whole or len(tokens.tokens) != len(num_verified):
            raise ReplayError(
                f"step {result.step_id} samples {len(num_verified)} tokens; "
                f"the recording has {num_found}"
            )
        too_many = any(
            not 0 < len(each) <= 1 + count
            for each, count in zip(tokens.tokens, num_verified, strict=True)
        )
        if too_many or len(tokens.drafts) != len(tokens.tokens):
            raise ReplayError(
                f"step {result.step_id} of the recording has other drafts than it verified"
            )
        return tokens

    def known_query_tokens(self, batch: Batch) -> Int64Array:
        """Returns the query tokens whose successors are known after the step.

        Tokens after rejected drafts are unchanged.
        """
        is_known = np.ones(batch.num_tokens, bool)
        if batch.drafts is not None:
            ends = batch.query_start_loc[batch.sample_indices + 1]
            for at, end, tokens in zip(batch.drafts.token_indices, ends, self.tokens, strict=True):
                is_known[at[len(tokens) - 1] + 1 : end] = False
        return np.flatnonzero(is_known)

    def num_agreeing_drafts(self, other: "StepTokens") -> int:
        """Returns how many leading drafts of all rows agree; -1 if tokens differ.

        Only then do both make the next draft from the same tokens.
        """
        if self.tokens != other.tokens:
            return -1
        columns = zip(*self.drafts, strict=True), zip(*other.drafts, strict=True)
        return next(
            (
                depth
                for depth, (mine, theirs) in enumerate(zip(*columns, strict=True))
                if mine != theirs
            ),
            max(map(len, self.drafts), default=0),
        )


def partings(
    *columns: Sequence[Sequence[int]],
) -> Iterator[tuple[int, int, list[int | None]]]:
    """Yields for each row with a difference: the row, the position and the tokens there.

    Args:
        columns: the tokens of each row, per side; None where a side has fewer.
    """
    for index, rows in enumerate(zip(*columns, strict=True)):
        for place in range(max(map(len, rows))):
            tokens = [row[place] if place < len(row) else None for row in rows]
            if len(set(tokens)) > 1:
                yield index, place, tokens
                break
