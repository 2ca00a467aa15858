"""Ranges of numbers of tokens, each compiled on its own."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

TYPICAL_NUM_TOKENS = 256
"""Number of tokens that code for any number is tuned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRange:
    """The numbers of tokens that a graph is compiled for, both ends included."""

    start: int = 1
    end: int = sys.maxsize

    def __contains__(self, num_tokens: int) -> bool:
        return self.start <= num_tokens <= self.end

    @property
    def typical(self) -> int:
        """The number of tokens that code for the range is tuned for; no other range has it."""
        return min(max(TYPICAL_NUM_TOKENS, self.start), self.end)


ANY_TOKENS = CompileRange()


def compile_ranges(ends: Sequence[int], max_num_tokens: int) -> list[CompileRange]:
    """Returns the ranges that end at `ends` and at the most tokens of a step, ascending.

    Ends past the most tokens are left out.
    """
    lasts = sorted({end for end in ends if end < max_num_tokens} | {max_num_tokens})
    starts = [1, *(last + 1 for last in lasts)]
    return [CompileRange(start=start, end=end) for start, end in zip(starts, lasts, strict=False)]
