"""Steps whose pieces between attention layers are graphs, padded to a captured number of tokens."""

import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from services.engine.compilation.graphs.graph_runner import GraphOutcome, require_same
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.worker.forward_pass import ForwardPass, PassShape
from services.engine.worker.input_buffers import InputBuffers, StepInputs
from services.engine.worker.step_arrays import StepArrays, StepLimits


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

    def capture(self, key: GraphKey) -> GraphOutcome:
        """Captures every piece for one number of tokens and tests them, between any two steps."""
        recorder = self._pieces.recorder
        started_s = time.monotonic()
        fault, num_bytes = "", 0
        try:
            inputs, shape = self._rehearse(key, 1)
            num_tokens = len(inputs.token_request)
            warmed_up = recorder.warm_up(lambda: self._forward(inputs, shape))
            expected = warmed_up[:num_tokens].clone()
            del warmed_up
            first_inputs, first_shape = self._rehearse(key, 0)
            recorder.synchronize()
            before = recorder.num_used_bytes()
            with self._pieces.capturing():
                self._forward(first_inputs, _in_pieces(first_shape, key))
            recorder.synchronize()
            num_bytes = max(0, recorder.num_used_bytes() - before)
            inputs, shape = self._rehearse(key, 1)
            require_same(expected, self._forward(inputs, _in_pieces(shape, key))[:num_tokens])
            self._pieces.check_again(key)
        except (GraphFaultError, torch.OutOfMemoryError) as error:
            self.drop(key)
            fault = str(error)
        capture_s = time.monotonic() - started_s
        return GraphOutcome(key=key, capture_s=capture_s, num_bytes=num_bytes, fault=fault)

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

    def _rehearse(self, key: GraphKey, variant: int) -> tuple[StepInputs, PassShape]:
        """Writes a step of dummy requests that fill the graph, as far as there are rows.

        They write to the null block alone, and all of them the same.
        """
        self._forward.refill_null_block()
        block_size, max_model_len = self._limits.block_size, self._limits.max_model_len
        q_len = min(block_size, max_model_len, key.num_tokens)
        batch_size = min(key.num_tokens // q_len, self._limits.max_num_seqs)
        seq_len = min(q_len + variant * block_size, max_model_len)
        num_tokens = batch_size * q_len
        arrays = StepArrays(
            query_start_loc=np.arange(0, num_tokens + 1, q_len, dtype=np.int32),
            seq_lens=np.full(batch_size, seq_len, np.int32),
            row_ids=np.full(batch_size, self._buffers.dummy_row, np.int32),
            sample_indices=np.empty(0, np.int32),
            num_tokens=num_tokens,
        )
        inputs = self._buffers.padded(self._buffers.write_step(arrays), key.num_tokens)
        shape = PassShape(is_prefill=True, max_seqlen_q=q_len, max_seqlen_k=seq_len)
        return inputs, shape


def _in_pieces(shape: PassShape, key: GraphKey) -> PassShape:
    return replace(shape, mode=CUDAGraphMode.PIECEWISE, graph_key=key)
