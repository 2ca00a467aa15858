"""Finds where the last tokens of a request occurred before: prompt lookup.

Each n-gram size has a table of fixed length: an n-gram's hash leads to the place after its latest
occurrence. A later n-gram with the same hash replaces the earlier one. A place that is found is
compared, so replaced and colliding entries only lose drafts.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FACTOR = 1_000_003
"""Odd, so that the low bits of a hash depend on all tokens."""
_MAX_ENTRIES = 2**18
_BULK = 32
"""Tokens from which numpy is faster than a loop."""


class NgramIndex:
    """The n-grams of one growing list of tokens.

    Memory is at most 4 * 2**18 bytes for each size, whatever the length. Each token is entered
    once for each size.
    """

    __slots__ = ("_mask", "_next_end", "_tables")

    def __init__(self, sizes: tuple[int, int], *, max_num_tokens: int) -> None:
        """Starts without tokens.

        Args:
            sizes: the shortest and the longest n-gram.
            max_num_tokens: most tokens that the list will have; sizes the tables.
        """
        length = min(_MAX_ENTRIES, 2 << max(4, (max_num_tokens - 1).bit_length()))
        self._mask = length - 1
        shortest, longest = sizes
        self._tables = {
            size: np.zeros(length, np.int32) for size in range(longest, shortest - 1, -1)
        }
        self._next_end = 1

    def following(self, token_ids: list[int], count: int) -> list[int]:
        """Returns `count` tokens that may follow, or none.

        They followed the latest earlier occurrence of the longest n-gram that ends the list. Where
        fewer followed, the list is taken to repeat itself from there on.

        Args:
            token_ids: the list, which has only grown since the last call.
            count: tokens wanted.
        """
        end = len(token_ids)
        # The n-grams that end the list are entered by the next call: they must not find themselves.
        self._enter(token_ids, end)
        if count < 1:
            return []
        for size, table in self._tables.items():
            if size >= end:
                continue
            last = token_ids[end - size :]
            found = int(table[_hash(last) & self._mask])
            if found and token_ids[found - size : found] == last:
                period = end - found
                return [token_ids[found + place % period] for place in range(count)]
        return []

    def _enter(self, token_ids: list[int], stop: int) -> None:
        """Enters the n-grams that end before `stop` tokens."""
        first, self._next_end = self._next_end, max(stop, self._next_end)
        if stop - first >= _BULK:
            for size, table in self._tables.items():
                start = max(first, size)
                if start < stop:
                    tokens = np.array(token_ids[start - size : stop - 1], np.int64)
                    table[_hashes(tokens, size) & self._mask] = np.arange(start, stop)
            return
        for end in range(first, stop):
            for size, table in self._tables.items():
                if size <= end:
                    table[_hash(token_ids[end - size : end]) & self._mask] = end


def _hash(token_ids: Sequence[int]) -> int:
    value = 0
    for token_id in token_ids:
        value = value * _FACTOR + token_id
    return value


def _hashes(token_ids: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Returns `_hash` of each n-gram, modulo 2**64."""
    count = len(token_ids) - size + 1
    values = np.zeros(count, np.int64)
    for place in range(size):
        values = values * _FACTOR + token_ids[place : place + count]
    return values
