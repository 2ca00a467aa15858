"""How far each kernel of a step moves it on, and the layer that repeats among the kernels.

A kernel may start before the one ahead of it has ended, so durations overlap. A kernel's *own* time
is from the end of everything before it to its own end; idle time before it is a *gap*. Own times
and gaps add up to the step.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tests.bench.trace_intervals import Work


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a copy, by its short name and its grid and threads."""

    name: str
    launch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One kernel of one step, in microseconds.

    duration: from its start to its end. own: from the end of all before it to its end, 0 if others
    end later. gap: idle time before it.
    """

    kernel: Kernel
    duration: float
    own: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Where a list repeats itself: `repeats` times `length` items from `begin` on."""

    begin: int
    length: int
    repeats: int

    @property
    def end(self) -> int:
        """The index after the last repeat."""
        return self.begin + self.length * self.repeats


def advances(step: Sequence[Work]) -> list[Advance]:
    """Returns what each kernel of a step, in order of starts, adds to the end of all before it."""
    found = []
    end = step[0].interval.start
    for work in step:
        start, own_end = work.interval.start, work.interval.end
        found.append(
            Advance(
                kernel=Kernel(short_name(work.name), work.launch),
                duration=own_end - start,
                own=max(0.0, own_end - max(end, start)),
                gap=max(0.0, start - end),
            )
        )
        end = max(end, own_end)
    return found


def find_period(items: Sequence[Hashable]) -> Period | None:
    """Returns the period whose repeats cover most of a list; None if nothing repeats.

    Of several it is the shortest, which repeats most: a layer rather than two.
    """
    best: Period | None = None
    for length in range(1, len(items) // 2 + 1):
        run = 0
        for index in range(len(items) - length):
            run = run + 1 if items[index] == items[index + length] else 0
            repeats = run // length + 1
            if repeats > 1 and (best is None or repeats * length > best.length * best.repeats):
                best = Period(begin=index + 1 - run, length=length, repeats=repeats)
    return best


def usual_steps(steps: Iterable[Sequence[Work]]) -> list[list[Advance]]:
    """Returns the steps that ran the kernels that most of them ran."""
    by_kernels: dict[tuple[Kernel, ...], list[list[Advance]]] = {}
    for step in map(advances, steps):
        by_kernels.setdefault(tuple(each.kernel for each in step), []).append(step)
    return max(by_kernels.values(), key=len, default=[])


def short_name(name: str) -> str:
    """Returns a kernel's name without namespaces."""
    return re.sub(r"^void |\(anonymous namespace\)::|\b\w+::", "", name)[:38]
