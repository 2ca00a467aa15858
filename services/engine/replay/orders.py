"""The descriptors that both sides run for a recorded step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.engine.batch import (
    BatchDescriptor,
    CUDAGraphMode,
    FallbackReason,
    GraphKey,
    ordered_mode,
)
from services.engine.replay.cache_content import BlockNumbers, Slots
from services.engine.replay.rows_alone import rows_alone
from services.engine.scheduler.dispatcher import BatchShape, Dispatch, GraphDispatcher

INVARIANT = "invariant"
"""The other side runs each row of a step alone."""
_WIRE_MODES = {
    "eager": CUDAGraphMode.CUDA_GRAPH_MODE_NONE,
    INVARIANT: CUDAGraphMode.CUDA_GRAPH_MODE_NONE,
    "piecewise": CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE,
    "full": CUDAGraphMode.CUDA_GRAPH_MODE_FULL,
}
_EAGER = Dispatch(graph_key=None, fallback_reason=FallbackReason.FALLBACK_REASON_ENFORCE_EAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One step for both sides; without graph_key, neither uses a graph.

    tested: the step, or the steps of its rows.
    """

    reference: BatchDescriptor
    tested: Sequence[BatchDescriptor]
    graph_key: GraphKey | None


class Orders:
    """Turns recorded descriptors into descriptors of a replay."""

    def __init__(
        self,
        against: str,
        catalogue: Iterable[GraphKey],
        blocks: BlockNumbers,
        *,
        allows: Callable[[GraphKey], bool],
    ) -> None:
        """Starts with the graphs that may be ordered.

        Args:
            against: "eager", "invariant", "piecewise" or "full".
            catalogue: graphs for steps recorded without one of this kind.
            blocks: the blocks of both sides' caches.
            allows: whether a recorded graph can be captured here.
        """
        self._mode = _WIRE_MODES[against]
        self._are_rows_alone = against == INVARIANT
        self._dispatcher = GraphDispatcher(captured=catalogue)
        self._blocks = blocks
        self._allows = allows

    def graph_key(self, descriptor: BatchDescriptor) -> GraphKey | None:
        """Returns the tested side's graph for a step."""
        return self._dispatch(descriptor).graph_key

    def order(self, descriptor: BatchDescriptor) -> Order:
        """Returns a recorded step for both sides."""
        dispatch = self._dispatch(descriptor)
        tested = self._ordered(descriptor, dispatch)
        return Order(
            reference=self._ordered(descriptor, _EAGER),
            tested=rows_alone(tested) if self._are_rows_alone else [tested],
            graph_key=dispatch.graph_key,
        )

    def loaded_blocks(self, descriptor: BatchDescriptor) -> Slots:
        """Returns the blocks that a recorded step loads from the host's memory."""
        return self._blocks.numbers_of(descriptor.block_copies.loaded_to)

    def _dispatch(self, descriptor: BatchDescriptor) -> Dispatch:
        key = descriptor.graph_key
        is_of_mode = descriptor.cudagraph_runtime_mode == self._mode
        if descriptor.HasField("graph_key") and is_of_mode and self._allows(key):
            return Dispatch(
                graph_key=key, fallback_reason=FallbackReason.FALLBACK_REASON_UNSPECIFIED
            )
        shape = descriptor.context
        return self._dispatcher.dispatch(
            BatchShape(
                num_tokens=shape.num_tokens,
                batch_size=shape.batch_size,
                max_q_len=shape.max_q_len,
            )
        )

    def _ordered(self, descriptor: BatchDescriptor, dispatch: Dispatch) -> BatchDescriptor:
        ordered = BatchDescriptor()
        ordered.CopyFrom(descriptor)
        key = dispatch.graph_key
        ordered.cudagraph_runtime_mode = ordered_mode(key)
        ordered.fallback_reason = dispatch.fallback_reason
        ordered.ClearField("graph_key")
        ordered.ClearField("block_copies")  # what they bring is computed again
        if key is not None:
            ordered.graph_key.CopyFrom(key)
        attention = ordered.attn_metadata
        if attention.HasField("block_table_updates"):
            self._blocks.renumber(attention.block_table_updates)
        if ordered.HasField("state_metadata"):
            self._blocks.renumber_copies(ordered.state_metadata)
        return ordered
