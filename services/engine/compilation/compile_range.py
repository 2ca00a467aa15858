"""Ranges of numbers of tokens, each compiled on its own."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompileRange:
    """The numbers of tokens from `first` to `last`, both included."""

    first: int
    last: int

    def __contains__(self, num_tokens: int) -> bool:
        return self.first <= num_tokens <= self.last

    def __str__(self) -> str:
        return f"{self.first} to {self.last} tokens"


def compile_ranges(ends: Sequence[int], max_num_tokens: int) -> list[CompileRange]:
    """Returns the ranges that end at `ends` and at the most tokens of a step, ascending.

    Ends past the most tokens are left out.
    """
    lasts = sorted({end for end in ends if end < max_num_tokens} | {max_num_tokens})
    firsts = [1, *(last + 1 for last in lasts)]
    return [CompileRange(first, last) for first, last in zip(firsts, lasts, strict=False)]
