"""Builds and reads BatchDescriptor and StepResult, the messages between scheduler and worker.

Both sides use the protobuf messages directly. Arrays in them are packed little-endian bytes; only
this module packs and views them.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from models import cudagraph_mode
from protos.engine.v1.batch_pb2 import (
    AttentionMetadata,
    BatchDescriptor,
    BlockCopies,
    CUDAGraphMode,
    DPMetadata,
    EncodedImage,
    EncoderRun,
    FallbackReason,
    GraphKey,
    GraphKind,
    RowAssignment,
    RowImage,
    RowSampling,
    SamplingMetadata,
    SharedPrefixes,
    SpecDecodeMetadata,
    StateMetadata,
    StepFailure,
    StepImage,
    StepResult,
)
from services.engine.prompt_image import PromptImage
from services.engine.request import SamplingParams

__all__ = [
    "AttentionMetadata",
    "BatchBuilder",
    "BatchDescriptor",
    "BlockCopies",
    "CUDAGraphMode",
    "DPMetadata",
    "EncodedImage",
    "EncoderRun",
    "FallbackReason",
    "GraphKey",
    "GraphKind",
    "Int32Array",
    "RowAssignment",
    "RowImage",
    "RowSampling",
    "SamplingMetadata",
    "SharedPrefixes",
    "SpecDecodeMetadata",
    "StateMetadata",
    "StepFailure",
    "StepImage",
    "StepResult",
    "num_rows",
    "ordered_mode",
    "pack_float32",
    "pack_int32",
    "read_float32",
    "read_int32",
    "read_tokens",
    "row_assignment",
    "runtime_mode",
    "set_prompt_logprobs",
    "step_result",
]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_NONE = np.empty(0, _INT32)
_MODES = {
    GraphKind.GRAPH_KIND_DECODE: CUDAGraphMode.CUDA_GRAPH_MODE_FULL,
    GraphKind.GRAPH_KIND_MIXED: CUDAGraphMode.CUDA_GRAPH_MODE_FULL,
    GraphKind.GRAPH_KIND_PIECEWISE: CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE,
}
"""The mode of a step that orders a graph, by the graph's kind."""


def read_int32(data: bytes) -> Int32Array:
    """Views packed int32 values without a copy; the array is read-only."""
    return np.frombuffer(data, _INT32)


def read_float32(data: bytes) -> Float32Array:
    """Views packed float32 values without a copy; the array is read-only."""
    return np.frombuffer(data, _FLOAT32)


def pack_int32(values: npt.ArrayLike) -> bytes:
    """Packs integers in row-major order, four little-endian bytes each."""
    if isinstance(values, list) and values and isinstance(values[0], int):
        return struct.pack(f"<{len(values)}i", *values)  # a third of NumPy's time
    return np.asarray(values, _INT32).tobytes()


@lru_cache(maxsize=64)
def _packed_numbers(count: int) -> bytes:
    """Packs the numbers from 0 to count - 1; most steps have those of the step before."""
    return pack_int32(range(count))


def pack_float32(values: npt.ArrayLike) -> bytes:
    """Packs floats in row-major order, four little-endian bytes each."""
    return np.asarray(values, _FLOAT32).tobytes()


def runtime_mode(mode: int) -> cudagraph_mode.CUDAGraphMode:
    """Returns the graph mode of a forward pass for a CUDAGraphMode of the wire.

    Raises:
        ValueError: the mode is unknown or unspecified.
    """
    name = CUDAGraphMode.Name(CUDAGraphMode.ValueType(mode)).removeprefix("CUDA_GRAPH_MODE_")
    if not mode:
        raise ValueError("cudagraph_runtime_mode is missing")
    return cudagraph_mode.CUDAGraphMode[name]


def ordered_mode(graph_key: GraphKey | None) -> CUDAGraphMode:
    """Returns the mode of a step that orders this graph, if any."""
    return CUDAGraphMode.CUDA_GRAPH_MODE_NONE if graph_key is None else _MODES[graph_key.kind]


class BatchBuilder:
    """Gathers one step in columns and turns it into a BatchDescriptor.

    The scheduler appends to the lists itself. `row_ids`, `q_lens` and `seq_lens` have one entry per
    request that is not in `decode`; `sample_indices` has the indices of the ones that sample.
    `grammar_rows` has the indices, among all that sample, of requests with a grammar;
    `grammar_masks` their masks.
    """

    def __init__(self) -> None:
        self.row_ids: list[int] = []
        self.q_lens: list[int] = []
        self.seq_lens: list[int] = []
        self.sample_indices: list[int] = []
        self.row_assignments: list[RowAssignment] = []
        self.drafts: SpecDecodeMetadata | None = None
        """Drafts to verify and the number to make; None without speculative decoding."""
        self.all_greedy = True
        self.needs_logit_edits = False
        self.needs_logprobs = False
        self.grammar_rows: list[int] = []
        self.grammar_masks: list[bytes] = []
        self.prompt_logprob_requests: list[int] = []
        self.num_prompt_logprobs = 0
        self.images: list[StepImage] = []
        """Images of which query tokens stand for vectors."""
        self.last_token_ids: list[int] = []
        """The newest token of each request that samples, if the worker's stages need it."""
        self.num_decodes = self._first_decode = self._longest_decode = 0
        self._decode_rows = self._decode_lens = _NONE
        self._blocks: list[tuple[int, int, tuple[int, ...]]] = []

    @property
    def num_requests(self) -> int:
        """Requests so far, hence the index of the next one."""
        return len(self.row_ids) + self.num_decodes

    def decode(self, rows: Int32Array, seq_lens: Int32Array, *, longest: int) -> None:
        """Adds requests of one query token that all sample, once a step; longest: of seq_lens."""
        self._first_decode, self.num_decodes = len(self.row_ids), len(rows)
        self._decode_rows, self._decode_lens, self._longest_decode = rows, seq_lens, longest

    def update_blocks(self, row: int, offset: int, block_ids: Sequence[int]) -> None:
        """Writes block ids into a row of the worker's block table, from entry `offset` on."""
        self._blocks.append((row, offset, tuple(block_ids)))

    def build(
        self,
        *,
        step_id: int,
        is_prefill: bool,
        graph_key: GraphKey | None,
        fallback_reason: FallbackReason,
    ) -> BatchDescriptor:
        """Returns the descriptor; the step must have at least one request."""
        batch_size = self.num_requests
        num_tokens, query_start_loc = batch_size, _packed_numbers(batch_size + 1)
        max_q_len = max(self.q_lens, default=1)
        if max_q_len > 1:
            q_lens = self._column(self.q_lens, np.ones(self.num_decodes, np.int32))
            starts = [0, *accumulate(q_lens.tolist())]
            num_tokens, query_start_loc = starts[-1], pack_int32(starts)
        descriptor = BatchDescriptor(
            step_id=step_id,
            graph_key=graph_key,
            cudagraph_runtime_mode=ordered_mode(graph_key),
            fallback_reason=fallback_reason,
            row_assignments=self.row_assignments,
            images=self.images,
        )
        context = descriptor.context
        context.is_prefill = is_prefill
        context.batch_size = batch_size
        context.num_tokens = num_tokens
        context.max_q_len = max_q_len
        attention = descriptor.attn_metadata
        attention.query_start_loc = query_start_loc
        attention.seq_lens = pack_int32(self._column(self.seq_lens, self._decode_lens))
        attention.row_ids = pack_int32(self._column(self.row_ids, self._decode_rows))
        attention.max_seqlen_q = max_q_len
        attention.max_seqlen_k = max((self._longest_decode, *self.seq_lens))
        if self._blocks:
            updates = attention.block_table_updates
            rows, offsets, blocks = zip(*self._blocks, strict=True)
            updates.rows, updates.offsets = pack_int32(rows), pack_int32(offsets)
            updates.counts = pack_int32(list(map(len, blocks)))
            updates.block_ids = pack_int32(list(chain.from_iterable(blocks)))
        sampling = descriptor.sampling
        sampling.sample_indices = self._sample_indices()
        sampling.all_greedy = self.all_greedy
        sampling.needs_logit_edits = self.needs_logit_edits
        sampling.needs_logprobs = self.needs_logprobs
        if self.grammar_rows:
            sampling.grammar_rows = pack_int32(self.grammar_rows)
            sampling.grammar_masks = b"".join(self.grammar_masks)
        if self.prompt_logprob_requests:
            sampling.prompt_logprob_requests = pack_int32(self.prompt_logprob_requests)
            sampling.num_prompt_logprobs = self.num_prompt_logprobs
        if self.last_token_ids:
            sampling.last_token_ids = pack_int32(self.last_token_ids)
        if self.drafts is not None:
            descriptor.spec_decode_metadata.CopyFrom(self.drafts)
        return descriptor

    def _column(self, values: list[int], of_decodes: Int32Array) -> Int32Array:
        """Returns a value of each request, in order."""
        if not values:
            return of_decodes
        first, others = self._first_decode, np.array(values, np.int32)
        return np.concatenate((others[:first], of_decodes, others[first:]))

    def _sample_indices(self) -> bytes:
        """Packs the indices of all requests that sample."""
        indices, first = self.sample_indices, self._first_decode
        if len(indices) + self.num_decodes == self.num_requests:
            return _packed_numbers(self.num_requests)
        return pack_int32(sorted((*indices, *range(first, first + self.num_decodes))))


def row_assignment(
    *,
    row: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    images: Sequence[PromptImage] = (),
    adapter_slot: int = 0,
) -> RowAssignment:
    """Builds the message for the request that takes `row`."""
    message = RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
    )
    if biases := sampling.biases:
        message.bias_token_ids = pack_int32([token_id for token_id, _ in biases])
        message.bias_values = pack_float32([bias for _, bias in biases])
    if sampling.min_tokens:
        message.end_token_ids = pack_int32(sorted(sampling.end_token_ids))
    return RowAssignment(
        row=row,
        token_ids=pack_int32(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        sampling=message,
        images=[
            RowImage(
                offset=each.offset,
                num_tokens=each.num_tokens,
                grid=each.image.grid,
                digest=each.image.digest,
            )
            for each in images
        ],
        adapter_slot=adapter_slot,
    )


def step_result(
    step_id: int,
    token_ids: npt.ArrayLike,
    *,
    logprobs: npt.ArrayLike | None = None,
    top_token_ids: npt.ArrayLike | None = None,
    top_logprobs: npt.ArrayLike | None = None,
    elapsed_us: int = 0,
    fallback_reason: FallbackReason = FallbackReason.FALLBACK_REASON_UNSPECIFIED,
    pooled: npt.ArrayLike | None = None,
) -> StepResult:
    """Builds the result of a step in which S requests sampled.

    Args:
        step_id: the step.
        token_ids: [S], the sampled tokens in the order of sample_indices.
        logprobs: [S], their log-probabilities, if the step needs them.
        top_token_ids: [S, n], the n most likely tokens, best first, if a request wants them.
        top_logprobs: [S, n], their log-probabilities.
        elapsed_us: microseconds the step took.
        fallback_reason: why the ordered graph did not run, if it did not.
        pooled: [S, size], the vectors of the requests, instead of tokens.
    """
    result = StepResult(
        step_id=step_id,
        token_ids=pack_int32(token_ids),
        elapsed_us=elapsed_us,
        fallback_reason=fallback_reason,
    )
    if pooled is not None:
        result.pooled = pack_float32(pooled)
    if logprobs is not None:
        result.logprobs = pack_float32(logprobs)
    if top_token_ids is not None and top_logprobs is not None:
        result.num_top_logprobs = np.shape(top_token_ids)[1]
        result.top_token_ids = pack_int32(top_token_ids)
        result.top_logprobs = pack_float32(top_logprobs)
    return result


def num_rows(descriptor: BatchDescriptor) -> int:
    """Returns the query tokens of a step, of the data-parallel rank that has most."""
    counts = read_int32(descriptor.dp_metadata.num_tokens_across_dp)
    return int(counts.max(initial=descriptor.context.num_tokens))


def read_tokens(result: StepResult) -> list[list[int]]:
    """Returns the tokens of each sampling request, at least one."""
    token_ids = read_int32(result.token_ids).tolist()
    if not result.num_accepted_tokens:
        return [[token_id] for token_id in token_ids]
    ends = np.cumsum(read_int32(result.num_accepted_tokens) + 1).tolist()
    return [token_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def set_prompt_logprobs(
    result: StepResult,
    logprobs: npt.ArrayLike,
    top_token_ids: npt.ArrayLike,
    top_logprobs: npt.ArrayLike,
) -> None:
    """Adds log-probabilities of N prompt tokens: [N], [N, n] and [N, n]."""
    result.prompt_logprobs = pack_float32(logprobs)
    result.num_prompt_top_logprobs = np.shape(top_token_ids)[1]
    result.prompt_top_token_ids = pack_int32(top_token_ids)
    result.prompt_top_logprobs = pack_float32(top_logprobs)
