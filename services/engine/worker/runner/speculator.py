"""Speculation in the worker: verifies and makes drafts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.layers.decoder import CausalLM
from services.engine.compilation.graphs.capture_plan import draft_key
from services.engine.limits import StepLimits
from services.engine.spec_decode.verification import Drafted
from services.engine.worker.graphs.draft_program import DraftProgram
from services.engine.worker.graphs.drafter import Drafter, DraftModel, padded
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.graphs.whole_graphs import GraphProgram
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.drafts import Drafts
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.input_buffers import InputBuffers
from services.engine.worker.inputs.sampled_positions import SampledPositions
from services.engine.worker.runner.outputs import ForwardOutput, Sampled

DraftWatcher = Callable[[tuple[Tensor, ...]], None]
"""Takes the hidden states that chose each of the k drafts of S rows: k of [S, hidden]."""


class Speculator(Protocol):
    """A runner's work on drafts, after sampling.

    programs: programs that follow a step's graph, by the kind of the graphs that capture them.
    """

    programs: Mapping[GraphKind, GraphProgram]

    def run_steps(self, forwards: Sequence[Callable[..., Tensor]]) -> None:
        """Makes each draft layer run as one of `forwards`."""

    def draft(
        self, batch: Batch, output: ForwardOutput, sampled: Sampled, graphs: GraphSet
    ) -> Drafted | None:
        """Verifies the step's drafts and makes the next ones; overwrites a graph's outputs."""


class NoSpeculation:
    """Speculation for steps without drafts."""

    programs: Mapping[GraphKind, GraphProgram] = {}

    def run_steps(self, forwards: Sequence[Callable[..., Tensor]]) -> None:
        """Does nothing."""

    def draft(
        self, batch: Batch, output: ForwardOutput, sampled: Sampled, graphs: GraphSet
    ) -> None:
        """Does nothing."""


class Speculation:
    """Speculation with drafts of a draft model, or of the scheduler.

    Every step verifies drafts, possibly none; a draft model makes the next ones. Drafts are written
    after the known tokens of their rows, as ordinary query tokens. Penalties, biases and
    log-probabilities of a sample after a draft include the drafts before it. The rows keep what the
    next step needs of this one: drafts, the newest token and the number of tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: DraftModel | None,
        forward: ForwardPass,
        buffers: InputBuffers,
        *,
        limits: StepLimits,
    ) -> None:
        """Takes what it works with.

        Args:
            model: whose tokens are guessed.
            layers: make the drafts; None if the scheduler does.
            forward: of the draft model, or of the model if that has the draft layers.
            buffers: the worker's.
            limits: the worker's.
        """
        self._buffers = buffers
        self._decode_q_len = limits.decode_q_len
        self._columns = torch.arange(
            limits.decode_q_len, dtype=torch.int32, device=buffers.tokens.device
        )
        self.layers = layers
        # Data-parallel ranks run draft layers together: those may have experts.
        self._is_joint = layers is not None and forward.dp_metadata is not None
        self._drafter = Drafter(layers, forward, buffers, limits=limits)
        self._program = DraftProgram(model, self._drafter, forward, buffers, limits=limits)
        self.programs: Mapping[GraphKind, GraphProgram] = {GraphKind.DRAFT: self._program}
        self.on_drafts: DraftWatcher = lambda _: None
        """Sees what the drafts of each step were chosen by, valid until the next step."""

    def run_steps(self, forwards: Sequence[Callable[..., Tensor]]) -> None:
        """Makes each draft layer run as one of `forwards`."""
        if self.layers is not None:
            self.layers.run_steps = list(forwards)

    def draft(
        self, batch: Batch, output: ForwardOutput, sampled: Sampled, graphs: GraphSet
    ) -> Drafted:
        """Verifies the step's drafts, writes each row's newest token and makes the next drafts."""
        at = SampledPositions.of(output.header, self._columns)
        drafts = at.drafts(self._buffers.tokens)  # drafting overwrites them
        drafted = self._replay(batch, output, sampled, drafts, graphs)
        if drafted is None:
            drafted = self._run(batch, output, sampled, drafts)
        self._buffers.keep_lengths(at.row_ids[:, 0], at.known_lengths(drafted.num_accepted))
        self.on_drafts(drafted.hidden)
        return drafted

    def _replay(
        self,
        batch: Batch,
        output: ForwardOutput,
        sampled: Sampled,
        drafts: Tensor,
        graphs: GraphSet,
    ) -> Drafted | None:
        """Drafts by the graph of the step's own; None if it cannot run."""
        key, num_requests = batch.graph_key, len(batch.sample_indices)
        if key is None or key.kind is not GraphKind.DECODE or output.fallback_reason:
            return None
        if not batch.all_sample:
            return None
        if _drafts_of(batch).num_next != key.max_q_len - 1:
            return None
        key = draft_key(key)
        if graphs.is_captured(key):
            self._program.write(
                key,
                hidden=output.hidden,
                sampled=sampled.token_ids,
                drafts=drafts,
            )
        outputs = graphs.replay(key, batch)
        if outputs is None:
            return None
        num_accepted, token_ids, *hidden = (each[:num_requests] for each in outputs)
        return Drafted(
            sampled=self._program.sampled[:num_requests].view(-1),
            num_accepted=num_accepted,
            token_ids=token_ids,
            hidden=tuple(hidden),
            by_graph=True,
        )

    def _run(
        self, batch: Batch, output: ForwardOutput, sampled: Sampled, drafts: Tensor
    ) -> Drafted:
        inputs = self._buffers.gather(
            output.header,
            batch.num_tokens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            is_prefill=batch.max_seqlen_q > self._decode_q_len,
        )
        hidden, num_single = output.hidden, None
        if self._is_joint and batch.num_sampling_across_dp is not None:
            inputs = self._buffers.padded(inputs, batch.num_rows)
            hidden = padded(hidden, batch.num_rows)
            num_single = int(batch.num_sampling_across_dp.max())
        return self._drafter.draft(
            inputs,
            hidden,
            sampled=sampled.token_ids.view(len(drafts), len(self._columns)),
            drafts=drafts,
            num_next=_drafts_of(batch).num_next,
            num_single=num_single,
        )


def _drafts_of(batch: Batch) -> Drafts:
    assert batch.drafts is not None, "descriptors of a speculating engine have drafts"
    return batch.drafts
