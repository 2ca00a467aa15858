"""The programs of whole steps: decodes up to their tokens, mixed steps up to hidden states."""

from collections.abc import Sequence

from torch import Tensor

from models.forward_context import GraphKey
from models.layers.decoder import CausalLM
from services.engine.compilation.graphs.recorder import Inputs, Program
from services.engine.limits import StepLimits
from services.engine.worker.inputs.dummy_steps import dummy_chunks, dummy_decodes
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.input_buffers import InputBuffers


class DecodeProgram:
    """A decode step: every request has one query token and its drafts, if any.

    Returns hidden states [T, hidden], this rank's logits [T, V / ranks] and the most likely token
    after each query token, [T] int32. Without drafts it also writes the tokens of sampling requests
    into their rows. A pipeline stage before the last returns the hidden states alone.
    """

    def __init__(
        self, model: CausalLM, forward: ForwardPass, buffers: InputBuffers, *, limits: StepLimits
    ) -> None:
        self._model = model
        self._forward = forward
        self._buffers = buffers
        self._limits = limits

    def implied(self, outputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Returns the tokens of a graph's own logits, as rounding may swap two near-equal ones."""
        if not self._model.stage.is_last:
            return ()
        return [self._model.lm_head.most_likely(outputs[1]).int()]

    def inputs(self, key: GraphKey) -> Inputs:
        """Returns the tensors that a graph reads."""
        return self._buffers.fixed(key) | self._forward.fixed

    def program(self, key: GraphKey) -> Program:
        """Returns the program for `graph_bs` requests."""
        header = self._buffers.header(key.graph_bs)

        def program() -> tuple[Tensor, ...]:
            inputs = self._buffers.gather(
                header,
                key.num_tokens,
                max_seqlen_q=key.max_q_len,
                max_seqlen_k=self._limits.max_model_len,
            )
            hidden = self._forward(inputs, key)
            if not self._model.stage.is_last:
                return (hidden,)
            head = self._model.lm_head
            logits = self._model.local_logits(hidden, self._forward.slots(key))
            if self._limits.num_speculative_tokens:
                return hidden, logits, head.most_likely(logits).int()
            token_ids = head.append_most_likely(
                logits, self._buffers.tokens, header.row_ids, header.append_positions
            )
            return hidden, logits, token_ids

        return program

    def write_dummy(self, key: GraphKey, variant: int) -> None:
        """Writes the header of dummy requests."""
        batch = dummy_decodes(
            self._limits,
            batch_size=key.graph_bs,
            q_len=key.max_q_len,
            row_id=self._buffers.dummy_row,
            variant=variant,
        )
        self._forward.reset_for(batch)
        self._buffers.write(batch, key)


class MixedProgram:
    """A step of any requests, up to its hidden states [T, hidden].

    It always launches attention of single tokens, of first chunks and of later ones; kernel
    programs without work end at once.
    """

    implied = None

    def __init__(self, forward: ForwardPass, buffers: InputBuffers, *, limits: StepLimits) -> None:
        self._forward = forward
        self._buffers = buffers
        self._limits = limits

    def inputs(self, key: GraphKey) -> Inputs:
        """Returns the tensors that a graph reads."""
        return self._buffers.fixed(key) | self._forward.fixed

    def program(self, key: GraphKey) -> Program:
        """Returns the program for `num_tokens` query tokens."""
        header = self._buffers.header(self._buffers.num_requests(key))

        def program() -> tuple[Tensor, ...]:
            inputs = self._buffers.gather(
                header,
                key.num_tokens,
                max_seqlen_q=key.num_tokens,
                max_seqlen_k=self._limits.max_model_len,
                is_prefill=True,
                lengths_vary=True,
            )
            return (self._forward(inputs, key),)

        return program

    def write_dummy(self, key: GraphKey, variant: int) -> None:
        """Writes the header of dummy requests."""
        batch = dummy_chunks(
            self._limits,
            num_tokens=key.num_tokens,
            max_requests=key.graph_bs,
            row_id=self._buffers.dummy_row,
            variant=variant,
        )
        self._forward.reset_for(batch)
        self._buffers.write(batch, key)
