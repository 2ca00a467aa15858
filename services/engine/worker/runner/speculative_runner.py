"""Runs steps that verify draft tokens and make the next ones."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.deepseek_mtp import DeepseekMTP
from models.kv_cache import CacheData
from models.layers.decoder import CausalLM
from models.ops.elementwise.table_entries import write_entries
from services.engine import batch
from services.engine.batch import BatchDescriptor
from services.engine.compilation.graphs.recorder import GraphRecorder
from services.engine.sampling.logprobs import compute_logprobs
from services.engine.spec_decode.verification import Verified
from services.engine.worker.graphs.decode_graphs import DecodedStep
from services.engine.worker.graphs.draft_graphs import DraftGraphs, DraftInputs
from services.engine.worker.graphs.drafter import Drafter, VerifiedRows
from services.engine.worker.inputs.forward_pass import PassShape
from services.engine.worker.inputs.input_buffers import StepHeader
from services.engine.worker.inputs.step_arrays import StepArrays, StepDrafts, StepLimits
from services.engine.worker.inputs.transfer import to_device
from services.engine.worker.runner.model_runner import (
    ComputedStep,
    ModelRunner,
    SampledStep,
    needs_choice,
)
from services.engine.worker.runner.row_sampling import SampledRows

DraftWatcher = Callable[[tuple[Tensor, ...]], None]
"""Gets what each of the k drafts of S rows was chosen by: k of [S, hidden], none if S is 0."""


def make_runner(
    model: CausalLM, kv_cache_data: list[CacheData], *, limits: StepLimits, device: torch.device
) -> ModelRunner:
    """Returns a runner that speculates if the limits say so; the model then has draft layers."""
    kind = SpeculativeRunner if limits.num_speculative_tokens else ModelRunner
    return kind(model, kv_cache_data, limits=limits, device=device)


class SpeculativeRunner(ModelRunner):
    """A runner whose steps all have drafts, be it none for some requests, and make the next ones.

    Drafts are written behind the known tokens of their rows, so that they are query tokens like
    any others. What is sampled behind each of them sees the drafts before it: penalties, biases
    and log-probabilities are those of the row as it would be.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache_data: list[CacheData],
        *,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        super().__init__(model, kv_cache_data, limits=limits, device=device)
        self._layers = DeepseekMTP(model)
        self._drafter = Drafter(self._layers, self._forward, self._buffers, limits=limits)
        self._draft_inputs = DraftInputs(model, limits)
        self._on_drafts: DraftWatcher = lambda _: None

    def watch_drafts(self, watcher: DraftWatcher) -> None:
        """Shows `watcher` what the drafts of each step were chosen by, good until the next step."""
        self._on_drafts = watcher

    def compute_draft_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Maps [S, hidden] that a draft was chosen by, after `depth` others, to [S, V]."""
        return self._layers.compute_logits(hidden, depth)

    def make_draft_graphs(self, recorder: GraphRecorder) -> DraftGraphs:
        """Returns what captures the drafting behind whole decode steps."""
        return DraftGraphs(
            self._drafter,
            self._forward,
            self._buffers,
            self._draft_inputs,
            recorder,
            limits=self._limits,
        )

    def _compute(self, descriptor: BatchDescriptor, arrays: StepArrays) -> ComputedStep:
        """Puts the drafts into their rows and runs the model over the step's tokens."""
        tokens = self._buffers.tokens
        entries = _drafts_of(arrays).entries(tokens.shape[1])
        if entries.size:
            write_entries(tokens, to_device(entries, self._device))
        return super()._compute(descriptor, arrays)

    def _sample(
        self, descriptor: BatchDescriptor, arrays: StepArrays, computed: ComputedStep
    ) -> SampledStep:
        """Samples behind every draft."""
        if computed.logits is None:
            return SampledStep(token_ids=computed.header.row_ids.new_empty(0), logprobs=None)
        if computed.token_ids is not None and not needs_choice(descriptor.sampling):
            return SampledStep(token_ids=computed.token_ids, logprobs=None)
        candidates = self._candidates(_drafts_of(arrays))
        chosen = self._choose(descriptor, candidates, computed.logits)
        logprobs = None
        if descriptor.sampling.needs_logprobs:
            num_top = self._row_sampling.num_logprobs(candidates)
            logprobs = compute_logprobs(computed.logits, chosen.clamp(min=0), num_top)
        return SampledStep(token_ids=chosen.int(), logprobs=logprobs)

    def _logits(self, arrays: StepArrays, header: StepHeader, hidden: Tensor) -> Tensor | None:
        """Maps the hidden states [T, hidden] of a step to logits where something is sampled."""
        places = _drafts_of(arrays).places
        if not places.size:
            return None
        index = to_device(places.ravel(), self._device)
        return self._model.compute_logits(hidden.index_select(0, index))

    def _of_graph(self, decoded: DecodedStep, arrays: StepArrays) -> ComputedStep:
        """Returns what a graph computed where something is sampled; everywhere as a rule."""
        computed = ComputedStep(header=decoded.header, hidden=decoded.hidden, logits=None)
        places = _drafts_of(arrays).places
        if not places.size:
            return computed
        logits, token_ids = decoded.logits, decoded.token_ids
        if not np.array_equal(places.ravel(), np.arange(len(logits))):
            index = to_device(places.ravel(), self._device)
            logits, token_ids = logits.index_select(0, index), token_ids.index_select(0, index)
        return replace(computed, logits=logits, token_ids=token_ids)

    def _candidates(self, drafts: StepDrafts) -> SampledRows:
        """Returns the rows and positions of all that is sampled, as if each were a row's newest."""
        host_rows, host_positions = drafts.row_ids.ravel(), drafts.positions.ravel()
        return SampledRows(
            row_ids=to_device(host_rows, self._device),
            seq_lens=to_device(host_positions, self._device),
            host_row_ids=host_rows,
            host_seq_lens=host_positions,
        )

    def _verify(
        self,
        descriptor: BatchDescriptor,
        arrays: StepArrays,
        computed: ComputedStep,
        sampled: SampledStep,
    ) -> SampledStep:
        """Accepts drafts, writes each row's newest token and guesses what follows it."""
        if _ran_whole_graph(descriptor, arrays, computed):
            assert self._graphs is not None, "a graph has run"
            ordered = self._ordered_graph(descriptor, CUDAGraphMode.FULL)
            key = replace(ordered, kind=GraphKind.DRAFT)
            drafted = self._graphs.replay_drafts(
                key,
                hidden=computed.hidden,
                sampled=sampled.token_ids,
                drafts=_drafts_of(arrays).token_ids,
            )
            if drafted is not None:
                self._on_drafts(drafted.hidden)
                return replace(sampled, token_ids=drafted.sampled, verified=drafted.verified)
        return replace(sampled, verified=self._draft_eagerly(arrays, computed, sampled))

    def _draft_eagerly(
        self, arrays: StepArrays, computed: ComputedStep, sampled: SampledStep
    ) -> Verified:
        """Verifies and drafts without a graph."""
        header, drafts = computed.header, _drafts_of(arrays)
        row_ids, seq_lens, ends = header.row_ids, header.seq_lens, header.query_start_loc[1:]
        if len(drafts.token_ids) != len(arrays.row_ids):
            row_ids, seq_lens, ends = (
                each.index_select(0, header.sample_indices) for each in (row_ids, seq_lens, ends)
            )
        rows = VerifiedRows.of(
            sampled.token_ids.view(drafts.places.shape),
            to_device(drafts.token_ids, self._device),
            row_ids=row_ids,
            seq_lens=seq_lens,
            ends=ends,
        )
        longest = int((arrays.query_start_loc[1:] - arrays.query_start_loc[:-1]).max())
        shape = PassShape(
            is_prefill=longest > self._limits.decode_q_len,
            max_seqlen_q=longest,
            max_seqlen_k=int(arrays.seq_lens.max()),
            is_draft=True,
        )
        inputs = self._buffers.gather(header, arrays.num_tokens)
        drafted = self._drafter.draft(inputs, shape, computed.hidden, rows)
        self._on_drafts(drafted.hidden)
        return Verified(num_accepted=rows.num_accepted.int(), draft_token_ids=drafted.token_ids)


def _ran_whole_graph(
    descriptor: BatchDescriptor, arrays: StepArrays, computed: ComputedStep
) -> bool:
    """Whether the graph of a decode step ran, and all of its requests sampled."""
    return (
        descriptor.graph_key.kind == batch.GraphKind.GRAPH_KIND_DECODE
        and not computed.fallback_reason
        and len(arrays.sample_indices) == len(arrays.row_ids)
    )


def _drafts_of(arrays: StepArrays) -> StepDrafts:
    assert arrays.drafts is not None, "descriptors of a speculating engine have drafts"
    return arrays.drafts
