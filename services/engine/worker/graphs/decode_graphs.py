"""Graphs of whole decode steps: from the header to the chosen tokens in one replay."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from models.layers.decoder import CausalLM
from models.ops.sampling.step_tokens import choose_greedily
from services.engine.compilation.graphs.graph_runner import GraphRunner, StartedCapture
from services.engine.compilation.graphs.recorder import GraphRecorder
from services.engine.sampling.sampler import greedy
from services.engine.worker.inputs.dummy_steps import dummy_decodes
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers, StepHeader
from services.engine.worker.inputs.step_arrays import StepArrays, StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedStep:
    """What a graph made of R requests and their T query tokens; overwritten by the next replay.

    hidden: [T, hidden]. logits: [T, V]. token_ids: [T] int32, the most likely token behind each. If
        each request has one query token, those of the requests that sample stand in their rows.
    """

    header: StepHeader
    hidden: Tensor
    logits: Tensor
    token_ids: Tensor


class DecodeGraphs:
    """Captures and replays steps in which every request brings one token, or it and its drafts.

    A graph gathers its inputs from the tables itself and writes greedy tokens back to them, so that
    a greedy step needs one copy, of its header, and one replay. Its attention is planned for the
    longest sequence there can be.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: ForwardPass,
        buffers: InputBuffers,
        recorder: GraphRecorder,
        *,
        limits: StepLimits,
    ) -> None:
        """Starts without graphs.

        Args:
            model: computes logits.
            forward: runs the model up to them.
            buffers: where its inputs lie.
            recorder: records the graphs.
            limits: the worker's.
        """
        self._model = model
        self._forward = forward
        self._buffers = buffers
        self._limits = limits
        self._graphs = GraphRunner(recorder)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def start_capture(self, key: GraphKey) -> StartedCapture:
        """Captures one graph, to be tested, between any two steps: live blocks stay as they are."""
        return self._graphs.start(
            key,
            self._program(key),
            self._buffers.fixed(key.graph_bs),
            lambda variant: self._rehearse(key, variant),
            # Rounding may turn the choice between two logits that are nearly equal, so the tokens
            # must be those of the graph's own logits.
            implied=lambda outputs: [greedy(outputs[1]).int()],
        )

    def replay(self, key: GraphKey, arrays: StepArrays) -> DecodedStep:
        """Runs a step of R <= graph_bs requests of max_q_len tokens each.

        Raises:
            GraphFaultError: the graph would read the wrong memory; nothing was computed.
        """
        header = self._buffers.write_decodes(arrays, key.graph_bs, key.max_q_len)
        outputs = self._graphs.replay(key, self._buffers.fixed(key.graph_bs))
        hidden, logits, token_ids = (output[: arrays.num_tokens] for output in outputs)
        return DecodedStep(header=header, hidden=hidden, logits=logits, token_ids=token_ids)

    def rehearse(self, key: GraphKey) -> None:
        """Runs what a graph would hold, without one: it builds every kernel that this takes."""
        self._rehearse(key, 0)
        self._program(key)()

    def drop(self, key: GraphKey) -> None:
        """Forgets a graph, if there is one."""
        self._graphs.drop(key)

    def _program(self, key: GraphKey) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        shape = PassShape(
            is_prefill=False,
            max_seqlen_q=key.max_q_len,
            max_seqlen_k=self._limits.max_model_len,
            mode=CUDAGraphMode.FULL,
            graph_key=key,
            is_recorded=True,
        )
        header = self._buffers.decodes(key.graph_bs)

        def program() -> tuple[Tensor, Tensor, Tensor]:
            inputs = self._buffers.gather(header, key.num_tokens)
            hidden = self._forward(inputs, shape)
            logits = self._model.compute_logits(hidden)
            if key.max_q_len > 1:
                return hidden, logits, greedy(logits).int()
            token_ids = choose_greedily(
                logits, self._buffers.tokens, header.row_ids, header.append_positions
            )
            return hidden, logits, token_ids

        return program

    def _rehearse(self, key: GraphKey, variant: int) -> None:
        """Writes the header of dummy requests."""
        self._forward.refill_null_block()
        self._buffers.write_header(
            dummy_decodes(
                self._limits,
                batch_size=key.graph_bs,
                q_len=key.max_q_len,
                row_id=self._buffers.dummy_row,
                variant=variant,
            )
        )
