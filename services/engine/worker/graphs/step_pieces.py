"""Steps whose pieces between attention layers are graphs, padded to a captured number of tokens."""

from dataclasses import replace

from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from models.ops.attention.cudagraph_support import AttentionCGSupport, attention_cudagraph_support
from services.engine.compilation.graphs.graph_runner import StartedCapture, start_capture
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation.graphs.verdict import Verdict
from services.engine.worker.inputs.dummy_steps import dummy_decodes, dummy_prompts
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers, StepInputs
from services.engine.worker.inputs.step_arrays import StepLimits


class StepPieces:
    """Captures and replays the pieces of steps of any kind.

    Attention runs between them, on the step's own tokens; what stands behind those is padding,
    whose keys and values are written nowhere.
    """

    def __init__(
        self,
        forward: ForwardPass,
        buffers: InputBuffers,
        pieces: PieceGraphs,
        *,
        limits: StepLimits,
    ) -> None:
        self._forward = forward
        self._buffers = buffers
        self._pieces = pieces
        self._limits = limits

    def start_capture(self, key: GraphKey) -> StartedCapture:
        """Captures every piece for one number of tokens, to be tested, between any two steps."""
        return start_capture(key, lambda: self._capture(key), drop=self.drop)

    def replay(self, key: GraphKey, inputs: StepInputs, shape: PassShape) -> Tensor:
        """Runs a step of T tokens; returns [T, hidden], good until the next replay.

        Raises:
            GraphFaultError: a graph would read the wrong memory. The step may be run again.
        """
        padded = self._buffers.padded(inputs, key.num_tokens)
        return self._forward(padded, _in_pieces(shape, key))[: len(inputs.token_request)]

    def drop(self, key: GraphKey) -> None:
        """Forgets the graphs of one number of tokens."""
        self._pieces.drop(key)

    def _capture(self, key: GraphKey) -> tuple[int, Verdict]:
        recorder = self._pieces.recorder
        inputs, shape = self._rehearse(key, 1)
        num_tokens = len(inputs.token_request)
        warmed_up = self._warm_up(inputs, shape)
        expected = warmed_up[:num_tokens].clone()
        del warmed_up
        first_inputs, first_shape = self._rehearse(key, 0)
        before = recorder.num_used_bytes()
        with self._pieces.capturing():
            self._forward(first_inputs, _in_pieces(first_shape, key))
        num_bytes = max(0, recorder.num_used_bytes() - before)
        inputs, shape = self._rehearse(key, 1)
        replayed = self._forward(inputs, _in_pieces(shape, key))[:num_tokens]
        self._pieces.check_again(key)
        return num_bytes, Verdict([expected], [replayed])

    def _warm_up(self, inputs: StepInputs, shape: PassShape) -> Tensor:
        """Runs the pieces and the attention between them, without graphs."""
        if attention_cudagraph_support(inputs.positions.device) is AttentionCGSupport.NEVER:
            # The reference of attention waits for the device, which only a graph must not do.
            return self._forward(inputs, shape)
        hidden: Tensor = self._pieces.recorder.warm_up(lambda: self._forward(inputs, shape))
        return hidden

    def _rehearse(self, key: GraphKey, variant: int) -> tuple[StepInputs, PassShape]:
        """Writes a step of dummy requests that fill the graph, as far as there are rows.

        Where one token of each suffices it is a step of short decodes: attention, which is not in
        the graphs, is one kernel then.
        """
        self._forward.refill_null_block()
        limits, row_id, num_tokens = self._limits, self._buffers.dummy_row, key.num_tokens
        is_prefill = num_tokens > limits.max_num_seqs
        if is_prefill:
            arrays = dummy_prompts(limits, num_tokens=num_tokens, row_id=row_id, variant=variant)
        else:
            arrays = dummy_decodes(
                limits,
                batch_size=num_tokens,
                q_len=1,
                row_id=row_id,
                variant=variant,
                max_keys=2 * limits.block_size * num_tokens,
            )
        inputs = self._buffers.padded(self._buffers.write_step(arrays), num_tokens)
        shape = PassShape(
            is_prefill=is_prefill,
            max_seqlen_q=int(arrays.query_start_loc[1]),
            max_seqlen_k=int(arrays.seq_lens.max()),
        )
        return inputs, shape


def _in_pieces(shape: PassShape, key: GraphKey) -> PassShape:
    return replace(shape, mode=CUDAGraphMode.PIECEWISE, graph_key=key)
