"""Graphs of what follows a whole decode step: its drafts are verified and the next ones made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey
from models.layers.decoder import CausalLM
from services.engine.compilation.graphs.graph_runner import GraphRunner, StartedCapture
from services.engine.compilation.graphs.recorder import GraphRecorder
from services.engine.spec_decode.verification import NO_DRAFT, Verified
from services.engine.worker.graphs.drafter import Drafter, VerifiedRows
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers
from services.engine.worker.inputs.step_arrays import Int32Array, StepArrays, StepLimits
from services.engine.worker.inputs.transfer import to_device


class DraftInputs:
    """What a graph reads beside the step's header and the tables, at addresses that never change.

    k drafts of each request: q = k + 1 query tokens.

    hidden: [max_decodes * q, hidden], what the model made of the step's tokens: the graph that made
        it shares its memory with the one that reads it here.
    sampled: [max_decodes, q] int32. drafts: [max_decodes, k] int32, padded with NO_DRAFT.
    """

    def __init__(self, model: CausalLM, limits: StepLimits) -> None:
        weight = model.lm_head.weight
        num_requests, q_len = limits.max_decodes, limits.decode_q_len
        shape = num_requests, q_len
        self.hidden = weight.new_zeros(num_requests * q_len, model.config.hidden_size)
        self.sampled = torch.zeros(shape, dtype=torch.int32, device=weight.device)
        self.drafts = torch.zeros_like(self.sampled[:, :-1])

    def fixed(self, graph_bs: int) -> Mapping[str, Tensor]:
        """Returns what a graph for so many requests reads of it, by name."""
        return {
            "hidden": self.hidden[: graph_bs * self.sampled.shape[1]],
            "sampled": self.sampled[:graph_bs],
            "drafts": self.drafts[:graph_bs],
        }

    def write(self, graph_bs: int, *, hidden: Tensor, sampled: Tensor, drafts: Int32Array) -> None:
        """Writes what R requests have, and what makes a dummy of those that fill up a graph."""
        num_tokens, num_requests = len(hidden), len(drafts)
        fixed = self.fixed(graph_bs)
        fixed["hidden"][:num_tokens] = hidden
        fixed["hidden"][num_tokens:].zero_()
        fixed["sampled"][:num_requests] = sampled.view(num_requests, -1)
        padded = np.full(fixed["drafts"].shape, NO_DRAFT, np.int32)
        padded[:num_requests] = drafts
        fixed["drafts"].copy_(to_device(padded, self.drafts.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedStep:
    """What a graph made of R requests; overwritten by the next replay.

    sampled: [R * (k + 1)] int32, what it was given. hidden: k of [R, hidden], what drafts were
        chosen by.
    """

    sampled: Tensor
    verified: Verified
    hidden: tuple[Tensor, ...]


class DraftGraphs:
    """Captures and replays the drafting behind decode steps that have graphs of their own.

    Such a graph finds the header of the step where the step's graph found it. The requests that
    fill it up stand in the dummy row, which holds no block: nothing that they write is read.
    """

    def __init__(
        self,
        drafter: Drafter,
        forward: ForwardPass,
        buffers: InputBuffers,
        inputs: DraftInputs,
        recorder: GraphRecorder,
        *,
        limits: StepLimits,
    ) -> None:
        self._drafter = drafter
        self._forward = forward
        self._buffers = buffers
        self._inputs = inputs
        self._limits = limits
        self._graphs = GraphRunner(recorder)

    def start_capture(self, key: GraphKey) -> StartedCapture:
        """Captures one graph, to be tested, between any two steps: live blocks stay as they are."""
        return self._graphs.start(
            key, self._program(key), self._fixed(key), lambda variant: self._rehearse(key, variant)
        )

    def replay(
        self, key: GraphKey, *, hidden: Tensor, sampled: Tensor, drafts: Int32Array
    ) -> DraftedStep:
        """Verifies and drafts for R requests, directly behind the graph of their step.

        Args:
            key: of the graph.
            hidden: [R * (k + 1), hidden], what the step made of its query tokens.
            sampled: [R * (k + 1)] int32, as `VerifiedRows.of` takes it.
            drafts: [R, k].

        Raises:
            GraphFaultError: the graph would read the wrong memory; nothing was computed.
        """
        self._inputs.write(key.graph_bs, hidden=hidden, sampled=sampled, drafts=drafts)
        num_requests = len(drafts)
        num_accepted, token_ids, *hidden_states = self._graphs.replay(key, self._fixed(key))
        return DraftedStep(
            sampled=self._inputs.sampled[:num_requests].view(-1),
            verified=Verified(
                num_accepted=num_accepted[:num_requests],
                draft_token_ids=token_ids[:num_requests],
                by_graph=True,
            ),
            hidden=tuple(each[:num_requests] for each in hidden_states),
        )

    def drop(self, key: GraphKey) -> None:
        """Forgets a graph, if there is one."""
        self._graphs.drop(key)

    def _fixed(self, key: GraphKey) -> Mapping[str, Tensor]:
        return {**self._buffers.fixed(key.graph_bs), **self._inputs.fixed(key.graph_bs)}

    def _program(self, key: GraphKey) -> Callable[[], tuple[Tensor, ...]]:
        shape = PassShape(
            is_prefill=False,
            max_seqlen_q=key.max_q_len,
            max_seqlen_k=self._limits.max_model_len,
            is_draft=True,
            mode=CUDAGraphMode.FULL,
            is_recorded=True,
        )
        header = self._buffers.decodes(key.graph_bs)
        fixed = self._inputs.fixed(key.graph_bs)

        def program() -> tuple[Tensor, ...]:
            rows = VerifiedRows.of(
                fixed["sampled"],
                fixed["drafts"],
                row_ids=header.row_ids,
                seq_lens=header.seq_lens,
                ends=header.query_start_loc[1:],
            )
            inputs = self._buffers.gather(header, key.num_tokens)
            drafted = self._drafter.draft(inputs, shape, fixed["hidden"], rows)
            return rows.num_accepted.int(), drafted.token_ids, *drafted.hidden

        return program

    def _rehearse(self, key: GraphKey, variant: int) -> None:
        """Writes dummy requests, some long, with from none to all of their drafts accepted.

        They write to the null block alone, and what they write does not depend on their order:
        those of different length never share a slot, and those of one length are alike.
        """
        self._forward.refill_null_block()
        limits, q_len = self._limits, key.max_q_len
        num_drafts, block_size = q_len - 1, limits.block_size
        # Where the last token of each goes: the drafts behind it take the slots up to the next one.
        past_last = min(block_size, limits.max_model_len) - num_drafts + 1
        slots = np.arange(num_drafts, max(q_len, past_last), 2 * num_drafts)
        # Each token finds the one behind it in the row.
        num_fitting = np.maximum(limits.max_model_len - q_len - slots, 0) // block_size
        halvings = np.minimum(np.arange(len(slots)) + variant, 31)
        num_full_blocks = np.minimum((limits.max_blocks_per_seq - 1) >> halvings, num_fitting)
        chosen = (np.arange(key.graph_bs) + variant) % len(slots)
        seq_lens = (num_full_blocks * block_size + slots + 1)[chosen].astype(np.int32)
        header = self._buffers.write_header(
            StepArrays(
                query_start_loc=np.arange(key.graph_bs + 1, dtype=np.int32) * q_len,
                seq_lens=seq_lens,
                row_ids=np.full(key.graph_bs, self._buffers.dummy_row, np.int32),
                sample_indices=np.empty(0, np.int32),
                num_tokens=key.num_tokens,
            )
        )
        columns = np.arange(q_len, dtype=np.int32)
        sampled = (seq_lens[:, None] + columns) % limits.vocab_size
        num_right = (chosen + variant) % q_len
        is_right = columns[:-1] < num_right[:, None]
        drafts = np.where(is_right, sampled[:, :-1], sampled[:, 1:])
        self._inputs.write(
            key.graph_bs,
            hidden=self._some_hidden(self._buffers.gather(header, key.num_tokens).positions),
            sampled=to_device(sampled, self._buffers.tokens.device),
            drafts=drafts,
        )

    def _some_hidden(self, positions: Tensor) -> Tensor:
        """Returns numbers for T tokens that depend on their positions alone, [T, hidden]."""
        hidden_size = self._inputs.hidden.shape[1]
        phases = torch.arange(hidden_size, device=positions.device)
        return (positions[:, None] + phases).sin()
