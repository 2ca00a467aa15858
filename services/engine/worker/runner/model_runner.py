"""Runs steps: from a descriptor to sampled tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import GraphKey
from models.kv_cache import CacheData
from models.layers.decoder import CausalLM
from models.ops.sampling.step_tokens import choose_greedily
from services.engine.batch import (
    BatchDescriptor,
    FallbackReason,
    SamplingMetadata,
    read_int32,
    runtime_mode,
)
from services.engine.compilation.graphs.capture_plan import read_key
from services.engine.compilation.graphs.recorder import GraphRecorder
from services.engine.sampling.grammar_masks import GrammarMasks
from services.engine.sampling.logit_edits import edit_logits
from services.engine.sampling.logprobs import Logprobs, compute_logprobs
from services.engine.sampling.sampler import greedy, sample
from services.engine.spec_decode.verification import Verified
from services.engine.worker.graphs.decode_graphs import DecodedStep
from services.engine.worker.graphs.draft_graphs import DraftGraphs
from services.engine.worker.graphs.worker_graphs import WorkerGraphs
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers, StepHeader
from services.engine.worker.inputs.step_arrays import (
    BlockWrites,
    StepArrays,
    StepLimits,
    check_assignments,
)
from services.engine.worker.runner.pending_result import PendingResult
from services.engine.worker.runner.prompt_logprobs import (
    SLICE_ROWS,
    PromptPositions,
    prompt_logprobs,
)
from services.engine.worker.runner.row_sampling import RowSamplingTable, SampledRows

OutputWatcher = Callable[[Tensor, Tensor | None], None]
"""Gets a step's hidden states, [T, hidden], and the logits of the S rows that sample, [S, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """What the model made of a step, and why it ran without the graph that it was to run.

    hidden: [T, hidden]. logits: [S, V] of the rows that sample; None if none does.
    token_ids: [S] int32, their most likely tokens, which stand in their rows already; None unless
        a graph chose them.
    """

    header: StepHeader
    hidden: Tensor
    logits: Tensor | None
    token_ids: Tensor | None = None
    fallback_reason: FallbackReason = FallbackReason.FALLBACK_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """What S rows sampled; token_ids is [S] int32.

    verified: with speculative decoding, what became of drafts; token_ids then has more of each row.
    """

    token_ids: Tensor
    logprobs: Logprobs | None
    verified: Verified | None = None


class ModelRunner:
    """A model, its KV cache and the rows of running requests.

    Steps run in the order of their calls. On CUDA `execute` only queues work: a step may be
    executed while earlier ones are still running, and its inputs come from their sampled tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache_data: list[CacheData],
        *,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._num_blocks = kv_cache_data[0].num_blocks
        self._limits = limits
        self._device = device
        self._buffers = InputBuffers(limits, device)
        self._forward = ForwardPass(
            model,
            kv_cache_data,
            block_table=self._buffers.block_table,
            block_size=limits.block_size,
            groups=limits.cache_groups,
        )
        self._graphs: WorkerGraphs | None = None
        self._on_outputs: OutputWatcher | None = None
        self._row_sampling = RowSamplingTable(
            num_rows=limits.max_num_seqs, vocab_size=limits.vocab_size, device=device
        )

    @property
    def model(self) -> CausalLM:
        """The model, as it is written."""
        return self._model

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._device

    @property
    def buffers(self) -> InputBuffers:
        """The worker's tables and inputs."""
        return self._buffers

    @property
    def forward(self) -> ForwardPass:
        """The model's forward pass over them."""
        return self._forward

    def make_draft_graphs(self, recorder: GraphRecorder) -> DraftGraphs | None:
        """Returns what captures the drafting behind whole decode steps; None without drafts."""
        del recorder
        return None

    def use_graphs(self, graphs: WorkerGraphs) -> None:
        """Lets steps be ordered that run graphs."""
        self._graphs = graphs

    def watch_outputs(self, watcher: OutputWatcher) -> None:
        """Shows `watcher` what the model made of each step, good until the next step."""
        self._on_outputs = watcher

    @torch.inference_mode()
    def update_tables(self, descriptor: BatchDescriptor) -> None:
        """Does what a step orders for rows and block tables, and computes nothing.

        Raises:
            ValueError: an assignment or an update is inconsistent or exceeds the worker's limits.
        """
        self._update_inputs(descriptor)
        self._row_sampling.assign(descriptor.row_assignments)

    @torch.inference_mode()
    def execute(self, descriptor: BatchDescriptor) -> PendingResult:
        """Runs one step, or on CUDA queues it.

        Raises:
            ValueError: the descriptor is inconsistent or exceeds the worker's limits.
        """
        started_ns = time.perf_counter_ns()
        arrays = StepArrays.read(descriptor, self._limits)
        self._update_inputs(descriptor)
        computed = self._compute(descriptor, arrays)
        # The device has something to do meanwhile.
        self._row_sampling.assign(descriptor.row_assignments)
        sampled = self._sample(descriptor, arrays, computed)
        if self._on_outputs is not None:
            self._on_outputs(computed.hidden, computed.logits)
        prompt_logprobs = self._prompt_logprobs(descriptor, arrays, computed.hidden)
        # From here on a graph's outputs may be gone.
        sampled = self._verify(descriptor, arrays, computed, sampled)
        return PendingResult.begin(
            descriptor.step_id,
            sampled.token_ids,
            sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            started_ns=started_ns,
            fallback_reason=computed.fallback_reason,
            verified=sampled.verified,
        )

    def _update_inputs(self, descriptor: BatchDescriptor) -> None:
        """Writes the tokens of rows that are assigned, and block tables."""
        check_assignments(descriptor, self._limits)
        writes = BlockWrites.read(descriptor, self._limits, num_blocks=self._num_blocks)
        self._buffers.assign_rows(descriptor.row_assignments)
        if writes is not None:
            self._buffers.write_blocks(writes)

    def _compute(self, descriptor: BatchDescriptor, arrays: StepArrays) -> ComputedStep:
        """Runs the model over the step's tokens as the scheduler ordered."""
        mode = runtime_mode(descriptor.cudagraph_runtime_mode)
        if mode is CUDAGraphMode.NONE:
            if self._graphs is not None and self._graphs.num_pending:
                num_decoded = len(arrays.seq_lens) * self._limits.decode_q_len
                is_decode = arrays.num_tokens == num_decoded
                self._graphs.note_missed(
                    num_tokens=arrays.num_tokens,
                    num_requests=len(arrays.seq_lens),
                    is_decode=is_decode,
                )
            return self._run_eagerly(descriptor, arrays)
        key = self._ordered_graph(descriptor, mode)
        assert self._graphs is not None, "_ordered_graph found the graph"
        if key.kind is GraphKind.DECODE:
            decoded = self._graphs.replay_decodes(key, arrays)
            if decoded is not None:
                return self._of_graph(decoded, arrays)
        elif key.kind is GraphKind.MIXED:
            computed = self._graphs.replay_prompts(key, arrays)
            if computed is not None:
                return self._of_pass(arrays, computed.header, computed.hidden)
        else:
            inputs = self._buffers.write_step(arrays)
            hidden = self._graphs.replay_pieces(key, inputs, _pass_shape(descriptor))
            if hidden is not None:
                return self._of_pass(arrays, inputs, hidden)
        return replace(
            self._run_eagerly(descriptor, arrays),
            fallback_reason=FallbackReason.FALLBACK_REASON_QUARANTINED,
        )

    def _run_eagerly(self, descriptor: BatchDescriptor, arrays: StepArrays) -> ComputedStep:
        """Runs the model without a graph."""
        inputs = self._buffers.write_step(arrays)
        return self._of_pass(arrays, inputs, self._forward(inputs, _pass_shape(descriptor)))

    def _of_pass(self, arrays: StepArrays, header: StepHeader, hidden: Tensor) -> ComputedStep:
        """Adds what follows a step's hidden states [T, hidden]."""
        logits = self._logits(arrays, header, hidden)
        return ComputedStep(header=header, hidden=hidden, logits=logits)

    def _logits(self, arrays: StepArrays, header: StepHeader, hidden: Tensor) -> Tensor | None:
        """Maps the hidden states [T, hidden] of a step to the logits of the rows that sample."""
        if not len(arrays.sample_indices):
            return None
        return self._model.compute_logits(_last_hidden(arrays, header, hidden))

    def _of_graph(self, decoded: DecodedStep, arrays: StepArrays) -> ComputedStep:
        """Returns what a graph computed for the rows that sample; all of them as a rule."""
        header, hidden = decoded.header, decoded.hidden
        if not len(arrays.sample_indices):
            return ComputedStep(header=header, hidden=hidden, logits=None)
        logits, token_ids = decoded.logits, decoded.token_ids
        if len(arrays.sample_indices) != len(arrays.seq_lens):
            logits = logits.index_select(0, header.sample_indices)
            token_ids = token_ids.index_select(0, header.sample_indices)
        return ComputedStep(header=header, hidden=hidden, logits=logits, token_ids=token_ids)

    def _ordered_graph(self, descriptor: BatchDescriptor, mode: CUDAGraphMode) -> GraphKey:
        """Returns the graph that a step shall run.

        Raises:
            ValueError: it was never announced, or the step does not fit it.
        """
        key, shape = read_key(descriptor.graph_key), descriptor.context
        if (
            self._graphs is None
            or not self._graphs.is_planned(key)
            or key.kind is GraphKind.DRAFT
            or key.kind.runtime_mode is not mode
        ):
            raise ValueError(
                f"the step's descriptor is invalid: it has graph mode {mode} with {key}, "
                "which was never captured"
            )
        fits = (
            shape.num_tokens <= key.num_tokens
            and shape.batch_size <= key.graph_bs
            and shape.max_q_len <= key.max_q_len
        )
        is_uniform = shape.num_tokens == shape.batch_size * key.max_q_len
        if not fits or (key.kind is GraphKind.DECODE and not is_uniform):
            raise ValueError(
                f"the step's descriptor is invalid: it has {shape.num_tokens} tokens of "
                f"{shape.batch_size} requests for {key}"
            )
        return key

    def _sample(
        self,
        descriptor: BatchDescriptor,
        arrays: StepArrays,
        computed: ComputedStep,
    ) -> SampledStep:
        """Samples for the requests that are due and writes their tokens into their rows."""
        header, logits = computed.header, computed.logits
        if logits is None:
            return SampledStep(token_ids=header.row_ids.new_empty(0), logprobs=None)
        sampling = descriptor.sampling
        if computed.token_ids is not None and not needs_choice(sampling):
            return SampledStep(token_ids=computed.token_ids, logprobs=None)
        sampled = _sampled_rows(arrays, header)
        if not needs_choice(sampling):
            tokens = self._buffers.tokens
            token_ids = choose_greedily(logits, tokens, sampled.row_ids, sampled.seq_lens)
            return SampledStep(token_ids=token_ids, logprobs=None)
        chosen = self._choose(descriptor, sampled, logits)
        token_ids = chosen.int()
        # The next step looks up a token of every row, also of one that has none (NO_TOKEN).
        chosen = chosen.clamp(min=0)
        self._buffers.append_tokens(sampled.row_ids, sampled.seq_lens, chosen.int())
        logprobs = None
        if sampling.needs_logprobs:
            num_top = self._row_sampling.num_logprobs(sampled)
            logprobs = compute_logprobs(logits, chosen, num_top)
        return SampledStep(token_ids=token_ids, logprobs=logprobs)

    def _verify(
        self,
        descriptor: BatchDescriptor,
        arrays: StepArrays,
        computed: ComputedStep,
        sampled: SampledStep,
    ) -> SampledStep:
        """Does what follows the sampling of a step with drafts; here there are none."""
        del descriptor, arrays, computed
        return sampled

    def _prompt_logprobs(
        self, descriptor: BatchDescriptor, arrays: StepArrays, hidden: Tensor
    ) -> Logprobs | None:
        """Returns the log-probabilities of the prompt tokens that the step is asked about."""
        sampling = descriptor.sampling
        if not sampling.prompt_logprob_requests:
            return None
        requests = read_int32(sampling.prompt_logprob_requests)
        num_prompt = self._row_sampling.num_prompt_tokens(arrays.row_ids)
        return prompt_logprobs(
            PromptPositions.read(arrays, requests, num_prompt),
            hidden=hidden,
            tokens=self._buffers.tokens,
            compute_logits=self._model.compute_logits,
            num_top=sampling.num_prompt_logprobs,
            slice_rows=min(SLICE_ROWS, self._limits.max_num_seqs),  # whose memory was measured
        )

    def _choose(self, descriptor: BatchDescriptor, sampled: SampledRows, logits: Tensor) -> Tensor:
        """Returns one token per row of logits [S, V], which stay if log-probabilities follow."""
        sampling = descriptor.sampling
        may_overwrite = not sampling.needs_logprobs
        if sampling.needs_logit_edits:
            edits = self._row_sampling.edits(sampled, self._buffers.tokens)
            if edits is not None:
                logits = edit_logits(logits, edits, in_place=may_overwrite)
                may_overwrite = True
        if sampling.grammar_rows:
            masks = GrammarMasks.read(sampling, self._limits.vocab_size)
            logits = masks.apply(logits, in_place=may_overwrite)
        if sampling.all_greedy:
            return greedy(logits)
        return sample(logits, self._row_sampling.choice(sampled))


def needs_choice(sampling: SamplingMetadata) -> bool:
    """Whether a step wants more of its logits than each row's most likely token."""
    return (
        not sampling.all_greedy
        or sampling.needs_logit_edits
        or sampling.needs_logprobs
        or bool(sampling.grammar_rows)
    )


def _pass_shape(descriptor: BatchDescriptor) -> PassShape:
    attention = descriptor.attn_metadata
    return PassShape(
        is_prefill=descriptor.context.is_prefill,
        max_seqlen_q=attention.max_seqlen_q,
        max_seqlen_k=attention.max_seqlen_k,
    )


def _sampled_rows(arrays: StepArrays, header: StepHeader) -> SampledRows:
    """Returns the rows that sample; all of the step's in the common case."""
    if len(arrays.sample_indices) == len(arrays.seq_lens):
        return SampledRows(
            row_ids=header.row_ids,
            seq_lens=header.seq_lens,
            host_row_ids=arrays.row_ids,
            host_seq_lens=arrays.seq_lens,
        )
    return SampledRows(
        row_ids=header.row_ids.index_select(0, header.sample_indices),
        seq_lens=header.seq_lens.index_select(0, header.sample_indices),
        host_row_ids=arrays.row_ids[arrays.sample_indices],
        host_seq_lens=arrays.seq_lens[arrays.sample_indices],
    )


def _last_hidden(arrays: StepArrays, header: StepHeader, hidden: Tensor) -> Tensor:
    """Returns the hidden states of the last query token of each row that samples: [S, hidden]."""
    if len(arrays.sample_indices) == arrays.num_tokens:
        return hidden
    ends = header.query_start_loc[1:].index_select(0, header.sample_indices)
    return hidden.index_select(0, ends - 1)
