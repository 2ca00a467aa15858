"""Runs steps: from a descriptor to sampled tokens."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from models.forward_context import (
    Context,
    CUDAGraphMode,
    ForwardContext,
    KVCacheData,
    forward_context,
)
from models.layers.decoder import CausalLM
from models.ops.attention_metadata import build_attention_metadata
from services.engine.batch import BatchDescriptor
from services.engine.sampling.logit_edits import edit_logits
from services.engine.sampling.logprobs import Logprobs, compute_logprobs
from services.engine.sampling.sampler import greedy, sample
from services.engine.worker.input_buffers import InputBuffers, StepInputs
from services.engine.worker.pending_result import PendingResult
from services.engine.worker.row_sampling import RowSamplingTable, SampledRows
from services.engine.worker.step_arrays import BlockWrites, StepArrays, StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """What S rows sampled; token_ids is [S] int32."""

    token_ids: Tensor
    logprobs: Logprobs | None


class ModelRunner:
    """A model, its KV cache and the rows of running requests.

    Steps run in the order of their calls. On CUDA `execute` only queues work: a step may be
    executed while earlier ones are still running, and its inputs come from their sampled tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache_data: list[KVCacheData],
        *,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        self._model = model
        self._kv_cache_data = kv_cache_data
        self._num_blocks = kv_cache_data[0].k.shape[0]
        self._limits = limits
        self._device = device
        self._buffers = InputBuffers(limits, device)
        self._row_sampling = RowSamplingTable(
            num_rows=limits.max_num_seqs, vocab_size=limits.vocab_size, device=device
        )

    @torch.inference_mode()
    def execute(self, descriptor: BatchDescriptor) -> PendingResult:
        """Runs one step, or on CUDA queues it.

        Raises:
            ValueError: the descriptor is inconsistent or exceeds the worker's limits.
        """
        started_ns = time.perf_counter_ns()
        arrays = StepArrays.read(descriptor, self._limits)
        writes = BlockWrites.read(descriptor, self._limits, num_blocks=self._num_blocks)
        if descriptor.row_assignments:
            self._row_sampling.assign(descriptor.row_assignments)
            self._buffers.assign_rows(descriptor.row_assignments)
        if writes is not None:
            self._buffers.write_blocks(writes)
        inputs = self._buffers.write_step(arrays)
        hidden = self._forward(descriptor, inputs)
        sampled = self._sample(descriptor, arrays, inputs, hidden)
        return PendingResult.begin(
            descriptor.step_id, sampled.token_ids, sampled.logprobs, started_ns
        )

    def _forward(self, descriptor: BatchDescriptor, inputs: StepInputs) -> Tensor:
        """Runs the model over the step's tokens: [T, hidden]."""
        shape, attention = descriptor.context, descriptor.attn_metadata
        attn_metadata = build_attention_metadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            row_ids=inputs.row_ids,
            block_table=self._buffers.block_table,
            positions=inputs.positions,
            token_request=inputs.token_request,
            block_size=self._limits.block_size,
            max_seqlen_q=attention.max_seqlen_q,
            max_seqlen_k=attention.max_seqlen_k,
        )
        context = ForwardContext(
            context=Context(
                positions=inputs.positions,
                is_prefill=shape.is_prefill,
                batch_size=shape.batch_size,
                graph_bs=shape.graph_bs,
                num_tokens=shape.num_tokens,
                max_q_len=shape.max_q_len,
                is_draft=shape.is_draft,
            ),
            attn_metadata=attn_metadata,
            kv_cache_data=self._kv_cache_data,
            cudagraph_runtime_mode=CUDAGraphMode(descriptor.cudagraph_runtime_mode),
        )
        with forward_context(context):
            hidden: Tensor = self._model(inputs.input_ids, inputs.positions)
        return hidden

    def _sample(
        self,
        descriptor: BatchDescriptor,
        arrays: StepArrays,
        inputs: StepInputs,
        hidden: Tensor,
    ) -> _Sampled:
        """Samples for the requests that are due and writes their tokens into their rows."""
        if not len(arrays.sample_indices):
            return _Sampled(token_ids=hidden.new_empty(0, dtype=torch.int32), logprobs=None)
        sampled = _sampled_rows(arrays, inputs)
        logits = self._model.compute_logits(_last_hidden(arrays, inputs, hidden))
        chosen = self._choose(descriptor, sampled, logits)
        token_ids = chosen.int()
        self._buffers.append_tokens(sampled.row_ids, sampled.seq_lens, token_ids)
        logprobs = None
        if descriptor.sampling.needs_logprobs:
            num_top = self._row_sampling.num_logprobs(sampled)
            logprobs = compute_logprobs(logits, chosen, num_top)
        return _Sampled(token_ids=token_ids, logprobs=logprobs)

    def _choose(self, descriptor: BatchDescriptor, sampled: SampledRows, logits: Tensor) -> Tensor:
        """Returns one token for each row of logits [S, V], which stay as they are."""
        if descriptor.sampling.needs_logit_edits:
            edits = self._row_sampling.edits(sampled, self._buffers.tokens)
            if edits is not None:
                logits = edit_logits(logits, edits)
        if descriptor.sampling.all_greedy:
            return greedy(logits)
        return sample(logits, self._row_sampling.choice(sampled))


def _sampled_rows(arrays: StepArrays, inputs: StepInputs) -> SampledRows:
    """Returns the rows that sample; all of the step's in the common case."""
    if len(arrays.sample_indices) == len(arrays.seq_lens):
        return SampledRows(
            row_ids=inputs.row_ids,
            seq_lens=inputs.seq_lens,
            host_row_ids=arrays.row_ids,
            host_seq_lens=arrays.seq_lens,
        )
    return SampledRows(
        row_ids=inputs.row_ids.index_select(0, inputs.sample_indices),
        seq_lens=inputs.seq_lens.index_select(0, inputs.sample_indices),
        host_row_ids=arrays.row_ids[arrays.sample_indices],
        host_seq_lens=arrays.seq_lens[arrays.sample_indices],
    )


def _last_hidden(arrays: StepArrays, inputs: StepInputs, hidden: Tensor) -> Tensor:
    """Returns the hidden states of the last query token of each row that samples: [S, hidden]."""
    if len(arrays.sample_indices) == arrays.num_tokens:
        return hidden
    ends = inputs.query_start_loc[1:].index_select(0, inputs.sample_indices)
    return hidden.index_select(0, ends - 1)
