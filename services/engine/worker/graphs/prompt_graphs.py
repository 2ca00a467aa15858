"""Graphs of whole steps with prompts: from the header to the last hidden states in one replay."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphRunner, StartedCapture
from services.engine.compilation.graphs.recorder import GraphRecorder
from services.engine.worker.inputs.dummy_steps import dummy_chunks
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers, StepHeader
from services.engine.worker.inputs.step_arrays import StepArrays, StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedPrompts:
    """What a graph made of a step's T query tokens; overwritten by the next replay.

    hidden: [T, hidden].
    """

    header: StepHeader
    hidden: Tensor


class PromptGraphs:
    """Captures and replays steps of any kind, each graph with room for a number of requests.

    Like the graph of a decode step, one of these gathers its inputs from the tables itself, and its
    attention is planned for the longest sequence there can be. It always launches what attends
    single tokens, chunks that begin a sequence and later ones; programs without work end at once.
    """

    def __init__(
        self,
        forward: ForwardPass,
        buffers: InputBuffers,
        recorder: GraphRecorder,
        *,
        limits: StepLimits,
    ) -> None:
        """Starts without graphs.

        Args:
            forward: runs the model.
            buffers: where its inputs lie.
            recorder: records the graphs.
            limits: the worker's.
        """
        self._forward = forward
        self._buffers = buffers
        self._limits = limits
        self._graphs = GraphRunner(recorder)

    def start_capture(self, key: GraphKey) -> StartedCapture:
        """Captures one graph, to be tested, between any two steps: live blocks stay as they are."""
        return self._graphs.start(
            key,
            self._program(key),
            self._buffers.fixed(self._num_requests(key)),
            lambda variant: self._rehearse(key, variant),
        )

    def replay(self, key: GraphKey, arrays: StepArrays) -> ComputedPrompts:
        """Runs a step of at most graph_bs requests and num_tokens query tokens.

        Raises:
            GraphFaultError: the graph would read the wrong memory; nothing was computed.
        """
        num_requests = self._num_requests(key)
        header = self._buffers.write_prompts(arrays, key.num_tokens, num_requests)
        (hidden,) = self._graphs.replay(key, self._buffers.fixed(num_requests))
        return ComputedPrompts(header=header, hidden=hidden[: arrays.num_tokens])

    def drop(self, key: GraphKey) -> None:
        """Forgets a graph, if there is one."""
        self._graphs.drop(key)

    def _num_requests(self, key: GraphKey) -> int:
        """Returns the requests that the graph computes, those that take its padding among them."""
        return key.graph_bs + self._limits.max_padding_requests

    def _program(self, key: GraphKey) -> Callable[[], tuple[Tensor]]:
        shape = PassShape(
            is_prefill=True,
            max_seqlen_q=key.num_tokens,
            max_seqlen_k=self._limits.max_model_len,
            mode=CUDAGraphMode.FULL,
            graph_key=key,
            is_recorded=True,
        )
        header = self._buffers.decodes(self._num_requests(key))

        def program() -> tuple[Tensor]:
            inputs = self._buffers.gather(header, key.num_tokens, lengths_vary=True)
            return (self._forward(inputs, shape),)

        return program

    def _rehearse(self, key: GraphKey, variant: int) -> None:
        """Writes the header of dummy requests."""
        self._forward.refill_null_block()
        arrays = dummy_chunks(
            self._limits,
            num_tokens=key.num_tokens,
            max_requests=key.graph_bs,
            row_id=self._buffers.dummy_row,
            variant=variant,
        )
        self._buffers.write_prompts(arrays, key.num_tokens, self._num_requests(key))
