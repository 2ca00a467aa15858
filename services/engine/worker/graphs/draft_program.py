"""The program after a whole decode step, which verifies the drafts and makes the next ones."""

import numpy as np
import torch
from torch import Tensor

from models.forward_context import GraphKey
from models.layers.decoder import CausalLM
from services.engine.compilation.graphs.recorder import Inputs, Program
from services.engine.limits import StepLimits
from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.graphs.drafter import Drafter
from services.engine.worker.inputs.dummy_steps import dummy_batch, dummy_hidden
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.input_buffers import InputBuffers
from services.engine.worker.inputs.transfer import to_device


class DraftProgram:
    """Verifies and makes drafts; returns the accepted counts, the drafts and hidden states.

    A graph reads the header and the tables of its step's graph. Requests that fill the graph use
    the dummy row. Besides, a graph reads these tensors at fixed addresses, for at most k drafts of
    each request and q = k + 1 query tokens. It makes as many drafts as it verifies:

    hidden: [max_decodes * q, hidden], hidden states of the step's query tokens, copied because the
    step's graph shares its memory with this one.
    sampled: [max_decodes, q] int32. drafts: [max_decodes, k] int32, padded with NO_DRAFT.
    """

    implied = None

    def __init__(
        self,
        model: CausalLM,
        drafter: Drafter,
        forward: ForwardPass,
        buffers: InputBuffers,
        *,
        limits: StepLimits,
    ) -> None:
        self._drafter = drafter
        self._forward = forward
        self._buffers = buffers
        self._limits = limits
        num_requests, q_len = limits.max_decodes, limits.decode_q_len
        device = buffers.tokens.device
        self.hidden = torch.zeros(
            (num_requests * q_len, model.output_size), dtype=model.dtype, device=device
        )
        self.sampled = torch.zeros((num_requests, q_len), dtype=torch.int32, device=device)
        self.drafts = torch.zeros_like(self.sampled[:, :-1])

    def write(self, key: GraphKey, *, hidden: Tensor, sampled: Tensor, drafts: Tensor) -> None:
        """Writes the inputs of R requests, possibly none, and of the dummies that fill the graph.

        Args:
            key: the graph.
            hidden: [R * q, hidden].
            sampled: [R * (k + 1)] int32.
            drafts: [R, k] int32, padded with NO_DRAFT.
        """
        num_tokens, num_requests = len(hidden), len(drafts)
        fixed = self._own_inputs(key)
        fixed["hidden"][:num_tokens] = hidden
        fixed["hidden"][num_tokens:].zero_()
        fixed["sampled"][:num_requests] = sampled.view(num_requests, self.sampled.shape[1])
        fixed["drafts"][:num_requests] = drafts
        fixed["drafts"][num_requests:].fill_(NO_DRAFT)

    def inputs(self, key: GraphKey) -> Inputs:
        """Returns the tensors that a graph reads."""
        return {**self._buffers.fixed(key), **self._own_inputs(key)}

    def program(self, key: GraphKey) -> Program:
        """Returns the program for `graph_bs` requests."""
        header = self._buffers.header(key.graph_bs)
        fixed = self._own_inputs(key)

        def program() -> tuple[Tensor, ...]:
            inputs = self._buffers.gather(
                header,
                key.num_tokens,
                max_seqlen_q=key.max_q_len,
                max_seqlen_k=self._limits.max_model_len,
            )
            drafted = self._drafter.draft(
                inputs,
                fixed["hidden"],
                sampled=fixed["sampled"],
                drafts=fixed["drafts"],
                num_next=key.max_q_len - 1,
                key=key,
            )
            return drafted.num_accepted, drafted.token_ids, *drafted.hidden

        return program

    def write_dummy(self, key: GraphKey, variant: int) -> None:
        """Writes dummy requests, some long, that accept from none to all of their drafts.

        They write only to the null block, and their order does not matter: requests of different
        length never share a slot, and requests of one length are alike.
        """
        limits, q_len = self._limits, key.max_q_len
        num_drafts, block_size = q_len - 1, limits.block_size
        # The slot of each last token; the drafts after it take the slots up to the next one.
        past_last = min(block_size, limits.max_model_len) - num_drafts + 1
        slots = np.arange(num_drafts, max(q_len, past_last), 2 * max(1, num_drafts))
        # Each token finds the next one in the row.
        num_fitting = np.maximum(limits.max_model_len - q_len - slots, 0) // block_size
        halvings = np.minimum(np.arange(len(slots)) + variant, 31)
        num_full_blocks = np.minimum((limits.max_blocks_per_seq - 1) >> halvings, num_fitting)
        chosen = (np.arange(key.graph_bs) + variant) % len(slots)
        seq_lens = (num_full_blocks * block_size + slots + 1)[chosen].astype(np.int32)
        starts = np.arange(key.graph_bs + 1) * q_len
        batch = dummy_batch(starts, seq_lens, self._buffers.dummy_row, is_prefill=False)
        self._forward.reset_for(batch)
        self._buffers.write(batch, key)
        # After the last draft its sample repeats.
        columns = np.minimum(np.arange(limits.decode_q_len, dtype=np.int32), num_drafts)
        sampled = (seq_lens[:, None] + columns) % limits.vocab_size
        num_right = (chosen + variant) % q_len
        is_right = columns[:-1] < num_right[:, None]
        drafts = np.where(is_right, sampled[:, :-1], sampled[:, 1:])
        drafts[:, num_drafts:] = NO_DRAFT
        header = self._buffers.header(key.graph_bs)
        inputs = self._buffers.gather(
            header, key.num_tokens, max_seqlen_q=q_len, max_seqlen_k=limits.max_model_len
        )
        self.write(
            key,
            hidden=dummy_hidden(inputs.positions, self.hidden.shape[1]),
            sampled=to_device(sampled, self.drafts.device),
            drafts=to_device(drafts, self.drafts.device),
        )

    def _own_inputs(self, key: GraphKey) -> dict[str, Tensor]:
        return {
            "hidden": self.hidden[: key.num_tokens],
            "sampled": self.sampled[: key.graph_bs],
            "drafts": self.drafts[: key.graph_bs],
        }
