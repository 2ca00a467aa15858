"""Chooses the captured graph that a step replays, from the shape of its batch alone."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.engine.batch import CUDAGraphMode, FallbackReason, GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What of a batch decides which graph fits."""

    num_tokens: int
    batch_size: int
    max_q_len: int

    @property
    def is_uniform(self) -> bool:
        """Whether every request has as many query tokens as the longest."""
        return self.num_tokens == self.batch_size * self.max_q_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How a step runs; without a graph, `fallback_reason` says why."""

    mode: CUDAGraphMode
    graph_key: GraphKey | None
    fallback_reason: FallbackReason


@dataclass(slots=True)
class _Sizes:
    """The graphs of one kind, by size: requests of uniform batches, else tokens."""

    captured: dict[int, GraphKey] = field(default_factory=dict)
    ascending: list[int] = field(default_factory=list)
    largest_planned: int = 0
    largest_quarantined: int = 0

    def capture(self, size: int, key: GraphKey) -> None:
        self.captured[size] = key
        self.ascending = sorted(self.captured)

    def quarantine(self, size: int) -> None:
        self.largest_quarantined = max(self.largest_quarantined, size)
        self.captured.pop(size, None)
        self.ascending = sorted(self.captured)

    def find(self, size: int) -> GraphKey | None:
        """Returns the smallest graph of at least this size."""
        index = bisect_left(self.ascending, size)
        return self.captured[self.ascending[index]] if index < len(self.ascending) else None

    def why_none(self, size: int) -> FallbackReason:
        """Returns why no graph has room for this size."""
        if size <= self.largest_quarantined:
            return FallbackReason.FALLBACK_REASON_QUARANTINED
        if size <= self.largest_planned or not self.largest_planned:
            return FallbackReason.FALLBACK_REASON_UNCAPTURED
        return FallbackReason.FALLBACK_REASON_OVERSIZE


class GraphDispatcher:
    """Knows the graphs that the worker captured.

    A graph for uniform batches holds the whole forward pass and fits batches of at most its
    graph_bs requests with exactly its query length. So does one with room for fewer requests than
    tokens, and it fits every batch within both. Any other graph holds the pieces between attention
    layers and fits every batch of at most its num_tokens tokens.
    """

    def __init__(
        self,
        captured: Iterable[GraphKey] = (),
        *,
        planned: Iterable[GraphKey] = (),
        without_graphs: FallbackReason = FallbackReason.FALLBACK_REASON_UNSUPPORTED,
    ) -> None:
        """Starts with what the worker said of itself.

        Args:
            captured: graphs that can be replayed now.
            planned: graphs that can be, or will be later.
            without_graphs: why nothing is planned, where that is so.
        """
        self._without_graphs = without_graphs
        self._full: dict[int, _Sizes] = {}
        self._prompts = _Sizes()
        self._pieces = _Sizes()
        self._has_plan = False
        captured = list(captured)
        for key in (*planned, *captured):
            sizes = self._sizes(key)
            sizes.largest_planned = max(sizes.largest_planned, _size(key))
            self._has_plan = True
        for key in captured:
            self.capture(key)

    def capture(self, key: GraphKey) -> None:
        """Lets steps run a graph from now on."""
        self._sizes(key).capture(_size(key), key)

    def quarantine(self, key: GraphKey) -> None:
        """Takes a graph away for good: its steps take the next larger one, or none."""
        self._sizes(key).quarantine(_size(key))

    def dispatch(self, shape: BatchShape) -> Dispatch:
        """Returns the smallest graph that fits, a full one rather than a piecewise one."""
        full = self._full.get(shape.max_q_len) if shape.is_uniform else None
        if full is not None and (key := full.find(shape.batch_size)) is not None:
            return _replay(CUDAGraphMode.CUDA_GRAPH_MODE_FULL, key)
        key = self._prompts.find(shape.num_tokens)
        if key is not None and shape.batch_size <= key.graph_bs:
            return _replay(CUDAGraphMode.CUDA_GRAPH_MODE_FULL, key)
        if (key := self._pieces.find(shape.num_tokens)) is not None:
            return _replay(CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE, key)
        if not self._has_plan:
            return _fall_back(self._without_graphs)
        if full is not None:
            return _fall_back(full.why_none(shape.batch_size))
        return _fall_back(self._pieces.why_none(shape.num_tokens))

    def _sizes(self, key: GraphKey) -> _Sizes:
        if key.uniform:
            return self._full.setdefault(key.max_q_len, _Sizes())
        return self._prompts if key.graph_bs < key.num_tokens else self._pieces


def _size(key: GraphKey) -> int:
    return key.graph_bs if key.uniform else key.num_tokens


def _replay(mode: CUDAGraphMode, key: GraphKey) -> Dispatch:
    return Dispatch(
        mode=mode,
        graph_key=key,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSPECIFIED,
    )


def _fall_back(reason: FallbackReason) -> Dispatch:
    return Dispatch(mode=CUDAGraphMode.CUDA_GRAPH_MODE_NONE, graph_key=None, fallback_reason=reason)
