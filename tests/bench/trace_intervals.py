"""Intervals of host and device activity, read from a profiler's trace; microseconds."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

PREFIX = "octavo "
"""Names of the host's sections begin with it."""

LAUNCHING = "execute"
"""The section that launches a step's work."""

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """From start to end, in microseconds."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or copy on the device, with its grid and number of threads, such as 384x1x1/256."""

    interval: Interval
    name: str
    launch: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A trace in rows.

    host: the sections by name. device: what each step that was launched ran, in order of time.
    """

    host: dict[str, list[Interval]]
    device: list[list[Interval]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Where the device's time went, from the first of the steps to the end of the last."""

    num_steps: int
    span_us: float
    busy_us: float
    idle_between_us: float
    idle_within_us: float

    @property
    def idle_between_share(self) -> float:
        """Share of the time between the end of one step and the start of the next."""
        return self.idle_between_us / self.span_us

    @property
    def idle_within_share(self) -> float:
        """Share of the time in which a step was under way and nothing ran."""
        return self.idle_within_us / self.span_us


def read_timeline(events: Iterable[dict]) -> Timeline:
    """Sorts the events of a Chrome trace into rows."""
    events = list(events)
    steps = work_of_steps(events)
    return Timeline(_sections(events), [[work.interval for work in step] for step in steps])


def work_of_steps(events: Iterable[dict]) -> list[list[Work]]:
    """Returns what each step ran on the device, in order of time; steps without work are left out.

    Work belongs to the step in whose launching section the host asked for it.
    """
    events = list(events)
    launched_at: dict[int, float] = {}
    device: list[tuple[int, Work]] = []
    for event in events:
        category, arguments = event.get("cat"), event.get("args", {})
        correlation = arguments.get("correlation")
        if event.get("ph") != "X" or correlation is None:
            continue
        if category in _LAUNCHES:
            launched_at[correlation] = event["ts"]
        elif category in _DEVICE:
            device.append((correlation, Work(_interval(event), event["name"], _launch(arguments))))
    launches = _sections(events).get(LAUNCHING, [])
    starts = [launch.start for launch in launches]
    steps: list[list[Work]] = [[] for _ in launches]
    for correlation, work in sorted(device, key=lambda item: item[1].interval):
        at = launched_at.get(correlation)
        step = -1 if at is None else bisect_right(starts, at) - 1
        if step >= 0 and at is not None and at <= launches[step].end:
            steps[step].append(work)
    return [step for step in steps if step]


def work_in_order(events: Iterable[dict]) -> list[Work]:
    """Returns all that ran on the device, in order of time."""
    found = [
        Work(_interval(event), event["name"], _launch(event.get("args", {})))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE
    ]
    return sorted(found, key=lambda work: work.interval)


def _sections(events: Iterable[dict]) -> dict[str, list[Interval]]:
    """Returns the host's sections by name, in order of time."""
    host: dict[str, list[Interval]] = {}
    for event in events:
        is_section = event.get("ph") == "X" and event.get("cat") == "user_annotation"
        if is_section and event["name"].startswith(PREFIX):
            host.setdefault(event["name"].removeprefix(PREFIX), []).append(_interval(event))
    for intervals in host.values():
        intervals.sort()
    return host


def _interval(event: dict) -> Interval:
    return Interval(event["ts"], event["ts"] + event["dur"])


def _launch(arguments: dict) -> str:
    """Returns a kernel's grid and threads; copies have none."""
    if "grid" not in arguments:
        return "-"
    return f"{'x'.join(map(str, arguments['grid']))}/{arguments['block'][0]}"


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Returns the union of intervals; those at most `gap` apart become one."""
    union: list[Interval] = []
    for interval in sorted(intervals):
        if union and interval.start <= union[-1].end + gap:
            union[-1] = Interval(union[-1].start, max(union[-1].end, interval.end))
        else:
            union.append(interval)
    return union


def device_use(steps: Sequence[Sequence[Interval]]) -> DeviceUse | None:
    """Returns where the device's time went; None for fewer than two steps."""
    if len(steps) < 2:
        return None
    spans = [Interval(min(step).start, max(each.end for each in step)) for step in steps]
    busy = merged(interval for step in steps for interval in step)
    covered = merged(spans)
    busy_us = sum(each.end - each.start for each in busy)
    covered_us = sum(each.end - each.start for each in covered)
    between_us = sum(later.start - earlier.end for earlier, later in pairwise(covered))
    return DeviceUse(
        num_steps=len(steps),
        span_us=covered[-1].end - covered[0].start,
        busy_us=busy_us,
        idle_between_us=between_us,
        idle_within_us=covered_us - busy_us,
    )
