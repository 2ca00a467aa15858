"""Finds the capture sizes that pad the observed steps least, exactly.

A step of t tokens runs the smallest graph with room for them and computes s - t tokens for nobody
when that graph's size is s; without such a graph it misses, and runs eagerly.

Only observed sizes are worth a graph. Let a plan have a size s that was not observed, and let t be
the largest observed size that s serves. With t in the place of s the same steps are served, and
each step that s served pads s - t less. Where s serves nothing it can be left out.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a set of capture sizes serves a histogram.

    num_hits: steps that find a graph. num_computed: query tokens that their graphs compute.
    num_padded: those of them that are padding.
    """

    num_steps: int
    num_hits: int
    num_computed: int
    num_padded: int

    @property
    def hit_rate(self) -> float:
        """Share of steps that find a graph; 1 where there are none."""
        return self.num_hits / self.num_steps if self.num_steps else 1.0

    @property
    def padding(self) -> float:
        """Share of computed tokens that are padding."""
        return self.num_padded / self.num_computed if self.num_computed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """What graphs of one kind take: they share a pool as large as the largest of them needs.

    pool_bytes: of the pool where the largest graph has pool_size tokens; it grows in proportion.
    bytes_per_graph: that every graph adds for itself.
    """

    pool_bytes: int
    pool_size: int
    bytes_per_graph: int

    @classmethod
    def from_measured(cls, num_bytes: Mapping[int, int]) -> "GraphMemory | None":
        """Estimates from what the captures of one engine took; None if that says nothing.

        Args:
            num_bytes: bytes that the capture of each size added.
        """
        if not any(num_bytes.values()):
            return None
        largest = max(num_bytes)
        rest = [taken for size, taken in num_bytes.items() if size != largest]
        # The largest is captured first and pays for the pool that the others then use.
        each = round(sum(rest) / len(rest)) if rest else 0
        return cls(
            pool_bytes=max(num_bytes[largest] - each, 0), pool_size=largest, bytes_per_graph=each
        )

    def of(self, *, largest: int, num_graphs: int) -> int:
        """Returns the bytes that so many graphs take, the largest of them of so many tokens."""
        return -(-self.pool_bytes * largest // self.pool_size) + self.bytes_per_graph * num_graphs


def fit(counts: Mapping[int, int], sizes: Sequence[int]) -> Fit:
    """Returns how sizes, ascending, serve steps that are counted by size."""
    num_hits = num_computed = num_padded = 0
    for size, count in counts.items():
        index = bisect_left(sizes, size)
        if index < len(sizes):
            num_hits += count
            num_computed += count * sizes[index]
            num_padded += count * (sizes[index] - size)
    return Fit(
        num_steps=sum(counts.values()),
        num_hits=num_hits,
        num_computed=num_computed,
        num_padded=num_padded,
    )


def plan_sizes(counts: Mapping[int, int], *, num_graphs: int, reach: int = 0) -> tuple[int, ...]:
    """Returns at most `num_graphs` sizes, ascending, that serve every step with least padding.

    The largest size is one of those chosen, so that no observed step misses.

    Args:
        counts: steps by size.
        num_graphs: most sizes; at least 1.
        reach: a size that must be served too, though no step of it may have been seen.
    """
    if num_graphs < 1:
        raise ValueError(f"num_graphs is {num_graphs}; a plan has at least 1")
    candidates = _candidates(counts, reach)
    if len(candidates) <= num_graphs:
        return tuple(candidates)
    return tuple(candidates[index] for index in _least_padding(candidates, counts, num_graphs))


def plan_within(
    counts: Mapping[int, int], *, num_bytes: int, memory: GraphMemory, reach: int = 0
) -> tuple[int, ...]:
    """Returns the sizes, ascending, that fit into memory and miss fewest steps, then pad least.

    Fewest misses settle the largest size: the largest that fits alone, since it serves whatever a
    smaller one does. What it leaves pays for a number of further graphs, which cost the same each,
    and `plan_sizes` is exact for that number. Nothing is returned if not even the smallest fits.

    Args:
        counts: steps by size.
        num_bytes: most bytes that all graphs may take.
        memory: what graphs take.
        reach: a size to serve too if it fits, though no step of it may have been seen.
    """
    affordable = [
        size
        for size in _candidates(counts, reach)
        if memory.of(largest=size, num_graphs=1) <= num_bytes
    ]
    if not affordable:
        return ()
    num_graphs = len(affordable)
    if memory.bytes_per_graph:
        left = num_bytes - memory.of(largest=affordable[-1], num_graphs=0)
        num_graphs = min(num_graphs, left // memory.bytes_per_graph)
    served = {size: counts.get(size, 0) for size in affordable}
    return plan_sizes(served, num_graphs=num_graphs, reach=affordable[-1])


def _candidates(counts: Mapping[int, int], reach: int) -> list[int]:
    """Returns the sizes worth a graph, ascending: the observed ones, and what must be reached."""
    observed = sorted(size for size, count in counts.items() if count)
    return observed if reach <= max(observed, default=0) else [*observed, reach]


def _least_padding(sizes: Sequence[int], counts: Mapping[int, int], num_graphs: int) -> list[int]:
    """Returns which `num_graphs` of the sizes, the last one among them, pad least.

    Dynamic programming over (number of sizes chosen, largest of them). With C[j] steps and W[j]
    tokens in all at the first j sizes, a chosen size s = sizes[j - 1] after a chosen sizes[i - 1]
    pads its steps by s (C[j] - C[i]) - (W[j] - W[i]), so that

        best[k][j] = s C[j] - W[j] + min over i < j of (best[k - 1][i] + W[i] - C[i] s).

    The minimum is over lines in s whose slopes -C[i] never grow, asked at growing s: the lower
    envelope gives it in constant time on average, O(n k) in all, in integers and so exactly.
    """
    num_sizes = len(sizes)
    steps = list(accumulate((counts.get(size, 0) for size in sizes), initial=0))
    tokens = list(accumulate((size * counts.get(size, 0) for size in sizes), initial=0))
    # With one graph, each size alone serves all before it.
    best = [0] + [sizes[j - 1] * steps[j] - tokens[j] for j in range(1, num_sizes + 1)]
    previous: list[array[int]] = []
    for num_chosen in range(2, num_graphs + 1):
        envelope: deque[tuple[int, int, int]] = deque()
        chosen_before = array("q", bytes(8 * (num_sizes + 1)))
        improved = best.copy()
        for j in range(num_chosen, num_sizes + 1):
            _add_line(envelope, (-steps[j - 1], best[j - 1] + tokens[j - 1], j - 1))
            size = sizes[j - 1]
            while len(envelope) > 1 and _at(envelope[1], size) <= _at(envelope[0], size):
                envelope.popleft()
            improved[j] = size * steps[j] - tokens[j] + _at(envelope[0], size)
            chosen_before[j] = envelope[0][2]
        best = improved
        previous.append(chosen_before)
    chosen = [num_sizes]
    while previous:
        chosen.append(previous.pop()[chosen[-1]])
    return [j - 1 for j in reversed(chosen)]


def _add_line(envelope: deque[tuple[int, int, int]], line: tuple[int, int, int]) -> None:
    """Adds a line (slope, value at 0, name) of no greater slope; drops those that never win now."""
    slope, start, _ = line
    if envelope and envelope[-1][0] == slope:
        if envelope[-1][1] <= start:
            return
        envelope.pop()
    while len(envelope) > 1:
        (slope_1, start_1, _), (slope_2, start_2, _) = envelope[-2], envelope[-1]
        # The middle line is useless if the new one overtakes the first no later than it does.
        if (start - start_1) * (slope_1 - slope_2) > (start_2 - start_1) * (slope_1 - slope):
            break
        envelope.pop()
    envelope.append(line)


def _at(line: tuple[int, int, int], size: int) -> int:
    return line[0] * size + line[1]
