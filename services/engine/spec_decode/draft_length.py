"""Chooses how many tokens to guess ahead, from what drafts bring and what steps cost.

A step of k drafts brings a request 1 + p(0) + p(0) p(1) + ... tokens, where p(i) is the share of
drafts at position i that hold once all before them do. The number with the most tokens per
microsecond is chosen. Shares and costs are measured while serving, and old measurements lose
weight: shares return to 1 and costs are forgotten, so that each number is tried again after a
while.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

DECAY = 0.98
"""Weight that a verification keeps after each later step."""
PRIOR = 0.25
"""Drafts that held before any was measured; few, so that one trial has weight."""
MIN_GAIN = 1.03
"""Gain over the present number that is worth a change, whose step drafts without a graph."""
MAX_COST_AGE = 512
"""Steps after which a cost is measured again."""
NUM_TIMED = 3
"""Steps that make a cost known."""
_LONGER, _SHORTER = 0.1, 0.5
"""Weight of a step that took longer than known, which has many causes, and of a shorter one."""


def lengths_between(fewest: int, most: int) -> tuple[int, ...]:
    """Returns the numbers of drafts to choose among, ascending: each costs graphs of its own."""
    return tuple(sorted({fewest, most, *(each for each in (1, 2, 4) if fewest < each < most)}))


def choice_of(lengths: Sequence[int]) -> "DraftLength | None":
    """Returns what chooses among ascending numbers of drafts; None if there is one."""
    return DraftLength(lengths) if len(lengths) > 1 else None


@dataclass(slots=True)
class _Cost:
    """The time of a step in microseconds."""

    us: float
    step: int
    num_timed: int = 1

    def take(self, us: float, step: int) -> None:
        us = min(us, 2 * self.us)  # a pause of the whole machine is no cost of drafts
        self.us += (us - self.us) * (_SHORTER if us < self.us else _LONGER)
        self.step = step
        self.num_timed += 1


@dataclass(slots=True)
class DraftLength:
    """Chooses the number of drafts of each step, in a few microseconds.

    lengths: numbers to choose among, ascending.
    """

    lengths: Sequence[int]
    _tried: list[float] = field(init=False)
    _held: list[float] = field(init=False)
    _costs: dict[tuple[int, int], _Cost] = field(default_factory=dict)
    _step: int = 0
    _last: int = field(init=False)
    """The number that won last."""

    def __post_init__(self) -> None:
        """Starts as if every draft held and all steps were equally fast."""
        self._tried = [0.0] * self.lengths[-1]
        self._held = [0.0] * self.lengths[-1]
        self._last = self.lengths[-1]

    @property
    def shares(self) -> list[float]:
        """The share of drafts that hold once those before them do, by position."""
        return [
            (held + PRIOR) / (tried + PRIOR)
            for held, tried in zip(self._held, self._tried, strict=True)
        ]

    def choose(self, num_requests: int, *, most: int) -> int:
        """Returns how many tokens to guess for each of `num_requests` requests.

        The most and the fewest are timed first; costs between two known ones are interpolated.

        Args:
            num_requests: requests of the step.
            most: drafts that a request will verify at most; hardly more are worth making.
        """
        lengths = self.lengths[: bisect_left(self.lengths, most) + 1]
        if len(lengths) == 1:
            return lengths[0]
        size = _size_of(num_requests)
        for length in (lengths[-1], lengths[0]):
            cost = self._cost(size, length)
            if cost is None or cost.num_timed < NUM_TIMED:
                return length
        tokens, expected = {0: 1.0}, 1.0
        chance = 1.0
        for position, share in enumerate(self.shares):
            chance *= share
            expected += chance
            tokens[position + 1] = expected
        costs = self._costs_of(size)
        gains = {length: tokens[length] / costs[length] for length in lengths}
        best = max(lengths, key=gains.__getitem__)
        if self._last not in gains or gains[best] > MIN_GAIN * gains[self._last]:
            self._last = best
        return self._last

    def observe_cost(self, num_requests: int, length: int, elapsed_us: int) -> None:
        """Takes the time of a step that verified and made as many drafts for each request."""
        size = _size_of(num_requests)
        known = self._cost(size, length)
        if known is None:
            self._costs[size, length] = _Cost(elapsed_us, self._step)
        else:
            known.take(elapsed_us, self._step)

    def observe_drafts(
        self, num_drafts: npt.NDArray[np.int32], num_accepted: npt.NDArray[np.int32]
    ) -> None:
        """Takes a step's verification: drafts of each request and how many held, [S] each."""
        self._step += 1
        for position in range(len(self._tried)):
            is_tried = (num_drafts > position) & (num_accepted >= position)
            tried, held = int(is_tried.sum()), int((num_accepted > position).sum())
            self._tried[position] = self._tried[position] * DECAY + tried
            self._held[position] = self._held[position] * DECAY + held

    def _cost(self, size: int, length: int) -> _Cost | None:
        cost = self._costs.get((size, length))
        if cost is not None and self._step - cost.step > MAX_COST_AGE:
            del self._costs[size, length]
            return None
        return cost

    def _costs_of(self, size: int) -> dict[int, float]:
        """Returns the cost of every length, of which the least and the greatest are known."""
        found = {length: self._cost(size, length) for length in self.lengths}
        known = [(length, cost.us) for length, cost in found.items() if cost is not None]
        places, values = zip(*known, strict=True)
        costs = np.interp(self.lengths, places, values).tolist()
        return dict(zip(self.lengths, costs, strict=True))


def _size_of(num_requests: int) -> int:
    """Returns the power of two up to which steps count as equally large."""
    return (num_requests - 1).bit_length() if num_requests > 0 else 0
