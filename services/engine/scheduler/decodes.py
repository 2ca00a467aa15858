"""The decodes of a step, in columns: a steady step changes only their lengths."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from services.engine.batch import Int32Array
from services.engine.request import Request
from services.engine.scheduler.sampling_needs import MIN_TOKENS, num_short

_ONE = np.int32(1)
_ROW_OF = attrgetter("row")


class Decodes(NamedTuple):
    """Requests that compute and sample one token each in a step.

    requests: in the order of the step; steps in a row with the same ones share the list.
    rows: [n], of each. seq_lens: [n], tokens of each with the one that is computed; longest: the
    most of them.
    needs: their `sampling_needs` together. num_short: steps, from this one on, in which some have
    fewer than their min_tokens.
    """

    requests: list[Request]
    rows: Int32Array
    seq_lens: Int32Array
    longest: int
    needs: int
    num_short: int


class DecodeColumns:
    """Makes the columns of each step from those of the step before, where requests are the same."""

    def __init__(self, row_needs: Sequence[int]) -> None:
        """Starts without a step; row_needs: `sampling_needs` of the request in each row."""
        self._row_needs = row_needs
        self._last: Decodes | None = None

    def next(self, requests: list[Request]) -> Decodes | None:
        """Returns the decodes of the step being planned; None for none.

        Every step comes here. A request that left its row and came back was not in between.

        Args:
            requests: have one token to compute, and sample. Their counts are already updated.
        """
        last = self._last
        if not requests:
            self._last = None
        elif last is not None and last.requests == requests:
            self._last = Decodes(
                requests=last.requests,
                rows=last.rows,
                seq_lens=last.seq_lens + _ONE,
                longest=last.longest + 1,
                needs=last.needs if last.num_short > 1 else last.needs & ~MIN_TOKENS,
                num_short=last.num_short - 1,
            )
        else:
            self._last = self._gathered(requests)
        return self._last

    def _gathered(self, requests: list[Request]) -> Decodes:
        rows = list(map(_ROW_OF, requests))
        needs_of_each = list(map(self._row_needs.__getitem__, rows))
        needs, most_short = 0, 0
        for each in set(needs_of_each):
            needs |= each
        if needs & MIN_TOKENS:
            most_short = max(
                num_short(request, request.num_computed_tokens)
                for request, own in zip(requests, needs_of_each, strict=True)
                if own & MIN_TOKENS
            )
        seq_lens = [each.num_computed_tokens for each in requests]
        return Decodes(
            requests=requests,
            rows=np.array(rows, np.int32),
            seq_lens=np.array(seq_lens, np.int32),
            longest=max(seq_lens),
            needs=needs if most_short > 0 else needs & ~MIN_TOKENS,
            num_short=most_short,
        )
