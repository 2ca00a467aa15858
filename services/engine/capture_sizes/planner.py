"""Finds the capture sizes that pad the observed steps least, exactly.

A step of t tokens runs the smallest graph of size s >= t and computes s - t tokens of padding.
Without such a graph it runs eagerly.

Only observed sizes are worth a graph: if t is the largest observed size that a graph of size s
serves, a graph of size t serves the same steps with s - t less padding each.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How capture sizes, ascending, serve steps counted by size.

    num_hits: steps with a graph. num_computed: query tokens that their graphs compute. num_padded:
    padding among these. num_bytes: memory of the graphs; None if unknown.
    """

    sizes: Sequence[int]
    num_steps: int
    num_hits: int
    num_computed: int
    num_padded: int
    num_bytes: int | None = None

    @classmethod
    def of(
        cls, counts: Mapping[int, int], sizes: Sequence[int], *, num_bytes: int | None = None
    ) -> "Fit":
        """Counts the hits and the padding of the steps in `counts`."""
        num_hits = num_computed = num_padded = 0
        for size, count in counts.items():
            index = bisect_left(sizes, size)
            if index < len(sizes):
                num_hits += count
                num_computed += count * sizes[index]
                num_padded += count * (sizes[index] - size)
        return cls(
            sizes=sizes,
            num_steps=sum(counts.values()),
            num_hits=num_hits,
            num_computed=num_computed,
            num_padded=num_padded,
            num_bytes=num_bytes,
        )

    @property
    def hit_rate(self) -> float:
        """Share of steps with a graph; 1 without steps."""
        return self.num_hits / self.num_steps if self.num_steps else 1.0

    @property
    def padding(self) -> float:
        """Share of padding in computed tokens."""
        return self.num_padded / self.num_computed if self.num_computed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Memory of the graphs of one kind, which share a pool sized for the largest.

    pool_bytes: the pool for a largest graph of pool_size tokens; it grows in proportion.
    bytes_per_graph: memory of each graph outside the pool.
    """

    pool_bytes: int
    pool_size: int
    bytes_per_graph: int

    @classmethod
    def from_measured(cls, num_bytes: Mapping[int, int]) -> "GraphMemory | None":
        """Estimates from the bytes that each captured size added; None if none added any."""
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
        """Returns the bytes of `num_graphs` graphs, the largest of them of `largest` tokens."""
        return -(-self.pool_bytes * largest // self.pool_size) + self.bytes_per_graph * num_graphs


def plan_sizes(counts: Mapping[int, int], *, num_graphs: int, reach: int = 0) -> tuple[int, ...]:
    """Returns at most `num_graphs` sizes, ascending, that serve all steps with least padding.

    Args:
        counts: steps by size.
        num_graphs: most sizes; at least 1.
        reach: a size to serve even without observed steps.
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
    """Returns the sizes, ascending, that fit into memory, miss fewest steps, then pad least.

    The largest size that fits alone misses fewest steps. The remaining memory bounds the number of
    further graphs, which cost the same each; `plan_sizes` is exact for a number.

    Args:
        counts: steps by size.
        num_bytes: most bytes of all graphs together.
        memory: memory of graphs of this kind.
        reach: a size to serve, if it fits, even without observed steps.
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
    observed = sorted(size for size, count in counts.items() if count)
    return observed if reach <= max(observed, default=0) else [*observed, reach]


def _least_padding(sizes: Sequence[int], counts: Mapping[int, int], num_graphs: int) -> list[int]:
    """Returns the indices of the `num_graphs` sizes, the last one among them, that pad least.

    Dynamic programming over (number of sizes chosen, largest of them). C[j] steps have W[j] tokens
    in all at the first j sizes. A chosen size s = sizes[j - 1] after a chosen sizes[i - 1] pads its
    steps by s (C[j] - C[i]) - (W[j] - W[i]), so that

        best[k][j] = s C[j] - W[j] + min over i < j of (best[k - 1][i] + W[i] - C[i] s).

    The best i never falls as j grows, so each j halves the range of i that remains for the sizes
    below and above it: O(n log n) for each k, in integers and so exact.
    """
    size = np.array([0, *sizes])
    count = np.array([counts.get(each, 0) for each in size.tolist()])
    steps, tokens = count.cumsum(), (count * size).cumsum()
    best = size * steps - tokens
    layers = []
    for _ in range(num_graphs - 1):
        before = best + tokens
        chosen = np.zeros_like(size)
        ranges = [(1, len(sizes), 0, len(sizes) - 1)]
        while ranges:
            low, high, first, last = ranges.pop()
            j = (low + high) // 2
            those = slice(first, min(last, j - 1) + 1)
            i = first + int((before[those] - steps[those] * size[j]).argmin())
            chosen[j] = i
            if low < j:
                ranges.append((low, j - 1, first, i))
            if j < high:
                ranges.append((j + 1, high, i, last))
        best = size * steps - tokens + before[chosen] - steps[chosen] * size
        layers.append(chosen)
    path = [len(sizes)]
    for chosen in reversed(layers):
        path.append(int(chosen[path[-1]]))
    return [j - 1 for j in reversed(path)]
