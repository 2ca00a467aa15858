"""Chooses the captured graph that a step replays, from the shape of its batch alone."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

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


class GraphDispatcher:
    """Knows the graphs that the worker captured.

    A graph for uniform batches holds the whole forward pass and fits batches of at most its
    graph_bs requests with exactly its query length. Any other graph holds the pieces between
    attention layers and fits every batch of at most its num_tokens tokens.
    """

    def __init__(self, catalogue: Iterable[GraphKey]) -> None:
        self._full: dict[int, list[GraphKey]] = defaultdict(list)
        self._piecewise: list[GraphKey] = []
        for key in catalogue:
            (self._full[key.max_q_len] if key.uniform else self._piecewise).append(key)
        for keys in self._full.values():
            keys.sort(key=_graph_bs)
        self._piecewise.sort(key=_num_tokens)

    def dispatch(self, shape: BatchShape) -> Dispatch:
        """Returns the smallest graph that fits, a full one rather than a piecewise one."""
        full = self._full.get(shape.max_q_len, []) if shape.is_uniform else []
        index = bisect_left(full, shape.batch_size, key=_graph_bs)
        if index < len(full):
            return _replay(CUDAGraphMode.CUDA_GRAPH_MODE_FULL, full[index])
        index = bisect_left(self._piecewise, shape.num_tokens, key=_num_tokens)
        if index < len(self._piecewise):
            return _replay(CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE, self._piecewise[index])
        if full or self._piecewise:
            return _fall_back(FallbackReason.FALLBACK_REASON_OVERSIZE)
        if self._full:
            return _fall_back(FallbackReason.FALLBACK_REASON_UNCAPTURED)
        return _fall_back(FallbackReason.FALLBACK_REASON_UNSUPPORTED)


def _replay(mode: CUDAGraphMode, key: GraphKey) -> Dispatch:
    return Dispatch(
        mode=mode,
        graph_key=key,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSPECIFIED,
    )


def _fall_back(reason: FallbackReason) -> Dispatch:
    return Dispatch(mode=CUDAGraphMode.CUDA_GRAPH_MODE_NONE, graph_key=None, fallback_reason=reason)


def _graph_bs(key: GraphKey) -> int:
    return key.graph_bs


def _num_tokens(key: GraphKey) -> int:
    return key.num_tokens
