"""A step's batch: the arrays of its descriptor, viewed and checked before any table changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from models import cudagraph_mode
from models.forward_context import GraphKey, PromptChunk
from services.engine.batch import (
    BatchDescriptor,
    CUDAGraphMode,
    EncodedImage,
    GraphKind,
    RowAssignment,
    SamplingMetadata,
    SharedPrefixes,
    SpecDecodeMetadata,
    StepImage,
    ordered_mode,
    read_int32,
    runtime_mode,
)
from services.engine.compilation.graphs.capture_plan import read_key
from services.engine.limits import StepLimits
from services.engine.worker.inputs.checks import Int32Array, is_below, refuse, require
from services.engine.worker.inputs.drafts import Drafts
from services.engine.worker.inputs.prefix_plan import PlannedPrefixes

_NO_GRAPH = CUDAGraphMode.CUDA_GRAPH_MODE_NONE
_ORDERED_KINDS = (
    GraphKind.GRAPH_KIND_DECODE,
    GraphKind.GRAPH_KIND_MIXED,
    GraphKind.GRAPH_KIND_PIECEWISE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step of R requests with T query tokens, S of which sample.

    query_start_loc: [R + 1]. seq_lens, row_ids: [R]. sample_indices: [S], ascending.
    num_tokens: T. max_seqlen_q, max_seqlen_k: longest query and longest sequence, in tokens.
    is_prefill: a request computes prompt tokens.
    graph_key: the graph that the scheduler ordered; None runs the step without one.
    drafts: drafts to verify; None without speculative decoding.
    num_tokens_across_dp: [ranks], tokens of all data-parallel ranks; None where there is one.
    num_sampling_across_dp: [ranks], requests that sample; None without speculative decoding, too.
    last_token_ids: [S], the newest token of each request that samples; None with one stage.
    block_writes: [2, n], indices into the flattened block table and block ids; None for no change.
    prefixes: leading keys that requests share; None for none.
    has_adapters: whether a request may have an adapter, or one of another data-parallel rank.
    saved_states, restored_states: [2, n], blocks to copy, from and to; None for no copy.
    assignments: rows that requests take with this step.
    encoded_images: images to encode before the forward pass.
    images: images of which query tokens stand for vectors.
    sampling: work that sampling can leave out; read while the device computes.
    """

    query_start_loc: Int32Array
    seq_lens: Int32Array
    row_ids: Int32Array
    sample_indices: Int32Array
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    is_prefill: bool
    step_id: int = 0
    graph_key: GraphKey | None = None
    drafts: Drafts | None = None
    last_token_ids: Int32Array | None = None
    num_tokens_across_dp: Int32Array | None = None
    num_sampling_across_dp: Int32Array | None = None
    block_writes: Int32Array | None = None
    prefixes: PlannedPrefixes | None = None
    has_adapters: bool = True
    saved_states: Int32Array | None = None
    restored_states: Int32Array | None = None
    assignments: Sequence[RowAssignment] = ()
    encoded_images: Sequence[EncodedImage] = ()
    images: Sequence[StepImage] = ()
    sampling: SamplingMetadata = field(default_factory=SamplingMetadata)

    @property
    def positions(self) -> Int32Array:
        """The position of each query token, [T]."""
        starts, q_lens = self.query_start_loc[:-1], np.diff(self.query_start_loc)
        first = self.seq_lens - q_lens - starts
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(first, q_lens)

    @property
    def num_rows(self) -> int:
        """Rows of hidden states that the step needs without a graph: T, or the most of any rank."""
        counts = self.num_tokens_across_dp
        return self.num_tokens if counts is None else max(self.num_tokens, int(counts.max()))

    @property
    def all_sample(self) -> bool:
        """Whether every request of a step with a decode graph samples, on all ranks."""
        counts, sampling = self.num_tokens_across_dp, self.num_sampling_across_dp
        if counts is None or sampling is None or self.graph_key is None:
            return len(self.sample_indices) == len(self.row_ids)
        return np.array_equal(sampling * np.int32(self.graph_key.max_q_len), counts)

    @property
    def chunks(self) -> tuple[PromptChunk, ...]:
        """The requests with several query tokens, in order."""
        if self.max_seqlen_q == 1:
            return ()
        starts, lengths = self.query_start_loc, self.seq_lens
        q_lens = starts[1:] - starts[:-1]
        return tuple(
            PromptChunk(
                request=request,
                first_token=int(starts[request]),
                num_queries=int(q_lens[request]),
                num_keys=int(lengths[request]),
            )
            for request in np.flatnonzero(q_lens > 1).tolist()
        )

    @classmethod
    def read(cls, descriptor: BatchDescriptor, limits: StepLimits, *, num_blocks: int) -> "Batch":
        """Views and checks a descriptor; later code reads the batch alone.

        Args:
            descriptor: the scheduler's order.
            limits: the worker's.
            num_blocks: blocks of the KV cache.

        Raises:
            ValueError: the descriptor contradicts itself or exceeds the limits. On a GPU such a
                step would write wrong memory or end the process without a message.
        """
        context, attention, sampling = (
            descriptor.context,
            descriptor.attn_metadata,
            descriptor.sampling,
        )
        copies = descriptor.state_metadata
        batch = cls(
            query_start_loc=read_int32(attention.query_start_loc),
            seq_lens=read_int32(attention.seq_lens),
            row_ids=read_int32(attention.row_ids),
            sample_indices=read_int32(sampling.sample_indices),
            num_tokens=context.num_tokens,
            max_seqlen_q=attention.max_seqlen_q,
            max_seqlen_k=attention.max_seqlen_k,
            is_prefill=context.is_prefill,
            step_id=descriptor.step_id,
            graph_key=ordered_graph(descriptor),
            block_writes=read_block_writes(descriptor, limits, num_blocks=num_blocks),
            saved_states=_read_copies(copies.saved_from, copies.saved_to, num_blocks),
            restored_states=_read_copies(copies.restored_from, copies.restored_to, num_blocks),
            assignments=read_assignments(descriptor, limits),
            encoded_images=descriptor.encoded_images,
            images=descriptor.images,
            sampling=sampling,
            last_token_ids=read_int32(sampling.last_token_ids) if limits.num_stages > 1 else None,
            num_tokens_across_dp=read_tokens_across_dp(descriptor, limits),
            num_sampling_across_dp=read_sampling_across_dp(descriptor, limits),
        )
        batch._check_sizes(context.batch_size, limits)
        batch._check_values(limits)
        if limits.shared_prefix_tokens and attention.HasField("shared_prefixes"):
            batch = batch._with_prefixes(attention.shared_prefixes, limits)
        return batch.with_drafts(descriptor.spec_decode_metadata, limits)

    def _with_prefixes(self, prefixes: SharedPrefixes, limits: StepLimits) -> "Batch":
        planned = PlannedPrefixes.read(
            prefixes,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_size=limits.block_size,
            most_queries=limits.decode_q_len,
        )
        return replace(self, prefixes=planned)

    def with_drafts(self, metadata: SpecDecodeMetadata, limits: StepLimits) -> "Batch":
        """Returns this batch with the drafts of a descriptor, or itself without speculation.

        Raises:
            ValueError: the drafts contradict the step or the limits.
        """
        if metadata.num_spec_steps != limits.num_speculative_tokens:
            refuse(f"num_spec_steps {metadata.num_spec_steps}, not {limits.num_speculative_tokens}")
        if not limits.num_speculative_tokens:
            return self
        drafts = Drafts.read(
            metadata,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            row_ids=self.row_ids,
            sample_indices=self.sample_indices,
            vocab_size=limits.vocab_size,
        )
        return replace(self, drafts=drafts)

    def fits(self, key: GraphKey) -> bool:
        """Whether a graph of this key has room for the step."""
        num_requests = len(self.row_ids)
        is_uniform = self.num_tokens == num_requests * key.max_q_len
        return (
            self.num_rows <= key.num_tokens
            and num_requests <= key.graph_bs
            and self.max_seqlen_q <= key.max_q_len
            and (is_uniform or key.kind is not cudagraph_mode.GraphKind.DECODE)
        )

    def last_token_entries(self, row_length: int) -> Int32Array | None:
        """Returns `last_token_ids` as writes to the table of tokens: [2, S], indices and values."""
        if self.last_token_ids is None:
            return None
        rows, ends = self.row_ids[self.sample_indices], self.seq_lens[self.sample_indices]
        return np.stack([rows * row_length + ends - 1, self.last_token_ids])

    def _check_sizes(self, batch_size: int, limits: StepLimits) -> None:
        sizes = (len(self.query_start_loc) - 1, len(self.seq_lens), len(self.row_ids))
        if sizes != (batch_size,) * 3:
            refuse(f"arrays of {sizes} requests, not {batch_size}")
        if not 0 < batch_size <= limits.max_num_seqs:
            refuse(f"{batch_size} requests")
        if not 0 < self.num_tokens <= limits.max_num_batched_tokens:
            refuse(f"{self.num_tokens} tokens")

    def _check_values(self, limits: StepLimits) -> None:
        # Plain slices and few reductions: this runs on every step's critical path.
        q_lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        longest = int(q_lens.max())
        require(int(q_lens.min()) > 0, "a request without a query token")
        if longest != self.max_seqlen_q:
            refuse(f"max_seqlen_q is {self.max_seqlen_q}, not {longest}")
        require(
            self.query_start_loc[0] == 0 and self.query_start_loc[-1] == self.num_tokens,
            "query_start_loc does not run from 0 to num_tokens",
        )
        require(int((self.seq_lens - q_lens).min()) >= 0, "a query longer than its sequence")
        longest = int(self.seq_lens.max())
        if longest != self.max_seqlen_k:
            refuse(f"max_seqlen_k is {self.max_seqlen_k}, not {longest}")
        if longest > limits.max_model_len:
            refuse(f"a sequence of {longest} tokens")
        require(is_below(self.row_ids, limits.max_num_seqs), "a row that does not exist")
        last = self.last_token_ids
        if last is not None:
            require(len(last) == len(self.sample_indices), "a request without its last token")
            require(is_below(last, limits.vocab_size), "a token outside the vocabulary")
        samples = self.sample_indices
        if not len(samples):
            return
        require(bool((samples[1:] > samples[:-1]).all()), "sample_indices that do not ascend")
        require(
            samples[0] >= 0 and samples[-1] < len(self.seq_lens), "a sample index out of the batch"
        )


def read_block_writes(
    descriptor: BatchDescriptor, limits: StepLimits, *, num_blocks: int
) -> Int32Array | None:
    """Expands block-table updates to [2, n], indices into the flattened table and block ids.

    Returns:
        None without updates.

    Raises:
        ValueError: an update is inconsistent or points outside the table or the cache.
    """
    if not descriptor.attn_metadata.HasField("block_table_updates"):
        return None
    updates = descriptor.attn_metadata.block_table_updates
    rows = read_int32(updates.rows)
    offsets = read_int32(updates.offsets)
    counts = read_int32(updates.counts)
    block_ids = read_int32(updates.block_ids)
    require(len(rows) == len(offsets) == len(counts), "block-table updates of unequal length")
    ends = np.cumsum(counts)
    require(len(ends) == 0 or ends[-1] == len(block_ids), "block ids missing or left over")
    width = limits.block_table_width
    require(is_below(rows, limits.max_num_seqs), "a block-table row that does not exist")
    require(
        bool(((offsets >= 0) & (counts >= 0) & (offsets + counts <= width)).all()),
        f"a block-table update outside a row of {width} entries",
    )
    require(is_below(block_ids, num_blocks), "a block that does not exist")
    first = rows * width + offsets
    entries = np.empty((2, len(block_ids)), np.int32)
    entries[0] = np.repeat(first - (ends - counts), counts) + np.arange(len(block_ids))
    entries[1] = block_ids
    return entries


def _read_copies(sources: bytes, targets: bytes, num_blocks: int) -> Int32Array | None:
    """Returns blocks to copy, [2, n], from and to; None for no copy.

    Raises:
        ValueError: the lists differ in length, a block does not exist, or one is written twice.
    """
    if not sources and not targets:
        return None
    from_, to = read_int32(sources), read_int32(targets)
    require(len(from_) == len(to), "copies of states of unequal length")
    for blocks in (from_, to):
        require(is_below(blocks, num_blocks), "a copy of a block that does not exist")
    require(len(np.unique(to)) == len(to), "a block that two copies write")
    return np.stack([from_, to])


def read_assignments(descriptor: BatchDescriptor, limits: StepLimits) -> Sequence[RowAssignment]:
    """Returns the rows that a step assigns.

    Raises:
        ValueError: a row does not exist, or its tokens do not fit.
    """
    for assignment in descriptor.row_assignments:
        token_ids = read_int32(assignment.token_ids)
        require(assignment.row < limits.max_num_seqs, f"assignment of row {assignment.row}")
        require(
            0 < assignment.num_prompt_tokens <= len(token_ids) <= limits.max_model_len,
            f"assignment of {len(token_ids)} tokens, {assignment.num_prompt_tokens} of the prompt",
        )
        require(is_below(token_ids, limits.vocab_size), "a token outside the vocabulary")
        require(
            assignment.adapter_slot <= limits.num_adapter_slots, "an adapter slot that is not there"
        )
    return descriptor.row_assignments


def read_tokens_across_dp(descriptor: BatchDescriptor, limits: StepLimits) -> Int32Array | None:
    """Returns the query tokens of each data-parallel rank, [ranks]; None where there is one.

    Raises:
        ValueError: they are not those of as many ranks, or exceed a step.
    """
    if not descriptor.HasField("dp_metadata"):
        return None  # a step that this rank runs alone
    counts = read_int32(descriptor.dp_metadata.num_tokens_across_dp)
    size = limits.data_parallel_size
    require(len(counts) == size > 1, f"the tokens of {len(counts)} data-parallel ranks")
    limit = max(limits.max_num_batched_tokens, descriptor.context.num_tokens)
    require(is_below(counts, limit + 1), f"more than {limit} tokens of a data-parallel rank")
    return counts


def read_sampling_across_dp(descriptor: BatchDescriptor, limits: StepLimits) -> Int32Array | None:
    """Returns the requests of each data-parallel rank that sample, [ranks]; None without drafts.

    Raises:
        ValueError: they are not those of as many ranks, or more than can sample.
    """
    if not limits.num_speculative_tokens or not descriptor.HasField("dp_metadata"):
        return None
    counts = read_int32(descriptor.dp_metadata.num_sampling_across_dp)
    require(
        len(counts) == limits.data_parallel_size,
        f"the sampling requests of {len(counts)} data-parallel ranks",
    )
    require(
        is_below(counts, limits.max_num_seqs + 1),
        f"more than {limits.max_num_seqs} sampling requests of a data-parallel rank",
    )
    return counts


def ordered_graph(descriptor: BatchDescriptor) -> GraphKey | None:
    """Returns the graph that a step orders, if any.

    Raises:
        ValueError: it is not one that a step can order.
    """
    mode, key = descriptor.cudagraph_runtime_mode, descriptor.graph_key
    if mode == _NO_GRAPH:
        return None
    if key.kind not in _ORDERED_KINDS or ordered_mode(key) != mode:
        refuse(f"graph mode {runtime_mode(mode)} with a graph of kind {key.kind}")
    return read_key(key)
