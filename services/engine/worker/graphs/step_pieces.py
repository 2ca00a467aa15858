"""Steps whose pieces between attention layers are graphs, padded to a captured size."""

from torch import Tensor

from models.forward_context import GraphKey
from models.kernels.gpu import has_kernels
from services.engine.compilation.graphs.fusion_check import FusionCheck
from services.engine.compilation.graphs.graph_runner import Captured, GraphCapture, Slices
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation.graphs.verdict import Verdict
from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.dummy_steps import dummy_decodes, dummy_prompts
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.input_buffers import InputBuffers


class StepPieces:
    """Captures and replays the pieces of steps of any kind.

    Attention runs between them on the step's own tokens; padding writes no keys and values.
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

    def capture(self, key: GraphKey) -> GraphCapture:
        """Returns the capture of all pieces for one number of tokens and their test."""
        return GraphCapture(key, self._capture(key), drop=self.drop)

    def replay(self, key: GraphKey, batch: Batch | None) -> tuple[Tensor]:
        """Runs a step whose header was written.

        Returns:
            The hidden states [num_tokens, hidden] of the step and its padding, valid until the next
            replay.

        Raises:
            GraphFaultError: a graph would read the wrong memory; the step may run again.
        """
        assert batch is not None, "steps run pieces"
        return (self._forward(self._buffers.gather_batch(batch, num_tokens=key.num_tokens), key),)

    def warm_up(self, key: GraphKey) -> None:
        """Runs the pieces and attention without graphs."""
        self._run_dummy(key)

    def drop(self, key: GraphKey) -> None:
        """Removes the graphs of one number of tokens."""
        self._pieces.drop(key)

    def _capture(self, key: GraphKey) -> Slices:
        recorder = self._pieces.recorder
        with FusionCheck() as fusions:
            num_tokens, warmed_up = self._run_dummy(key)
        expected = warmed_up[:num_tokens].clone()
        del warmed_up
        yield
        first = self._write_dummy(key, 0)
        before = recorder.num_used_bytes()
        with self._pieces.capturing():
            self.replay(key, first)
        num_bytes = max(0, recorder.num_used_bytes() - before)
        yield
        (replayed,) = self.replay(key, self._write_dummy(key, 1))
        self._pieces.check_again(key)
        test = Verdict([expected], [replayed[:num_tokens]], fusions.comparisons)
        return Captured(test=test, num_bytes=num_bytes)

    def _run_dummy(self, key: GraphKey) -> tuple[int, Tensor]:
        """Runs a dummy step without graphs; returns its query tokens and hidden states."""
        batch = self._write_dummy(key, 1)
        inputs = self._buffers.gather_batch(batch, num_tokens=key.num_tokens)
        # Pieces add adapters, whether the step has some or not.
        with self._forward.adding_adapters():
            if not has_kernels(inputs.positions.device):
                # The reference of attention waits for the device, which only a graph forbids.
                return batch.num_tokens, self._forward(inputs)
            hidden: Tensor = self._pieces.recorder.warm_up(lambda: self._forward(inputs))
        return batch.num_tokens, hidden

    def _write_dummy(self, key: GraphKey, variant: int) -> Batch:
        """Writes the header of dummy requests that fill the graph, as far as rows allow.

        If one token per request fills it, the step is one of short decodes, whose attention is one
        kernel outside the graphs.
        """
        limits, row_id, num_tokens = self._limits, self._buffers.dummy_row, key.num_tokens
        if num_tokens > limits.max_num_seqs:
            batch = dummy_prompts(limits, num_tokens=num_tokens, row_id=row_id, variant=variant)
        else:
            batch = dummy_decodes(
                limits,
                batch_size=num_tokens,
                q_len=1,
                row_id=row_id,
                variant=variant,
                max_keys=2 * limits.block_size * num_tokens,
            )
        self._forward.reset_for(batch)
        self._buffers.write(batch)
        return batch
