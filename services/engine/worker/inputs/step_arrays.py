"""A descriptor's arrays on the host, checked before anything is written to the tables."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.engine.batch import BatchDescriptor, SpecDecodeMetadata, read_int32
from services.engine.kv_cache.cache_groups import LayerGroup
from services.engine.spec_decode.verification import NO_DRAFT

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large a step and the worker's tables may be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    cache_groups: tuple[LayerGroup, ...] = ()
    """The model's layers by the blocks that they keep; empty: they are one group."""
    num_speculative_tokens: int = 0
    """Draft tokens of a request in a step at most; 0 without speculative decoding."""

    @property
    def decode_q_len(self) -> int:
        """Query tokens of each request in a decode step: the newest and its drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def max_decodes(self) -> int:
        """Most requests in a decode step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.decode_q_len)

    @property
    def max_padding_requests(self) -> int:
        """Requests that can have as many tokens as the largest step, which thus fill up any."""
        return -(-self.max_num_batched_tokens // self.max_model_len)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that the longest sequence needs in each group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_groups(self) -> int:
        """How many groups there are; a row of the block table has their entries in turns."""
        return max(1, len(self.cache_groups))

    @property
    def block_table_width(self) -> int:
        """Entries of a row of the block table."""
        return self.max_blocks_per_seq * self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """Drafts of the S requests that sample, k at most of each.

    Each is sampled for at k + 1 places: after its last query token that is no draft and after
    each draft. Where there are fewer, the last place stands for the rest.

    token_ids: [S, k], padded with NO_DRAFT.
    places: [S, k + 1], query tokens, by their number in the step.
    row_ids: [S, k + 1]. positions: [S, k + 1], where in its row the token goes.
    """

    token_ids: Int32Array
    places: Int32Array
    row_ids: Int32Array
    positions: Int32Array

    @classmethod
    def read(
        cls,
        metadata: SpecDecodeMetadata,
        *,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        row_ids: Int32Array,
        sample_indices: Int32Array,
        vocab_size: int,
    ) -> "StepDrafts":
        """Lays a step's drafts out.

        Args:
            metadata: the drafts.
            query_start_loc: [R + 1], of the step, as all that follow.
            seq_lens: [R].
            row_ids: [R].
            sample_indices: [S].
            vocab_size: drafts are below it.

        Raises:
            ValueError: they contradict the step.
        """
        counts = read_int32(metadata.num_draft_tokens)
        token_ids = read_int32(metadata.draft_token_ids)
        num_steps, num_sampling = metadata.num_spec_steps, len(sample_indices)
        q_lens = np.diff(query_start_loc)
        _require(len(counts) == len(seq_lens), "a request without its number of drafts")
        _require(len(token_ids) == counts.sum(), "drafts missing or left over")
        _require(
            bool(((counts >= 0) & (counts <= num_steps) & (counts < q_lens)).all()),
            "more drafts than query tokens or than num_spec_steps",
        )
        _require(counts[sample_indices].sum() == counts.sum(), "drafts that are not verified")
        _require(
            not len(token_ids) or 0 <= token_ids.min() <= token_ids.max() < vocab_size,
            "a draft outside the vocabulary",
        )
        counts = counts[sample_indices][:, None]
        columns = np.arange(num_steps + 1, dtype=np.int32)
        padded = np.full((num_sampling, num_steps), NO_DRAFT, np.int32)
        padded[columns[:-1] < counts] = token_ids
        from_end = np.minimum(columns, counts) - counts
        return cls(
            token_ids=padded,
            places=query_start_loc[sample_indices + 1][:, None] - 1 + from_end,
            row_ids=np.repeat(row_ids[sample_indices][:, None], num_steps + 1, axis=1),
            positions=seq_lens[sample_indices][:, None] + from_end,
        )

    def entries(self, row_length: int) -> Int32Array:
        """Returns the drafts as writes to the table of tokens: [2, D], indices and values."""
        is_draft = self.token_ids != NO_DRAFT
        rows, positions = self.row_ids[:, :-1][is_draft], self.positions[:, :-1][is_draft]
        return np.stack([rows * row_length + positions, self.token_ids[is_draft]])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What a step's R requests are, of which S sample, T query tokens in all.

    query_start_loc: [R + 1]. seq_lens, row_ids: [R]. sample_indices: [S], ascending. drafts: of a
    step with speculative decoding.
    """

    query_start_loc: Int32Array
    seq_lens: Int32Array
    row_ids: Int32Array
    sample_indices: Int32Array
    num_tokens: int
    drafts: StepDrafts | None = None

    @classmethod
    def read(cls, descriptor: BatchDescriptor, limits: StepLimits) -> "StepArrays":
        """Views the arrays of a descriptor.

        Raises:
            ValueError: they contradict each other or exceed the limits; on a GPU such a step would
                write wrong memory or end the process without saying why.
        """
        attention = descriptor.attn_metadata
        arrays = cls(
            query_start_loc=read_int32(attention.query_start_loc),
            seq_lens=read_int32(attention.seq_lens),
            row_ids=read_int32(attention.row_ids),
            sample_indices=read_int32(descriptor.sampling.sample_indices),
            num_tokens=descriptor.context.num_tokens,
        )
        _require_supported(descriptor, limits)
        arrays._check_shape(descriptor.context.batch_size, limits)
        arrays._check_values(attention.max_seqlen_q, attention.max_seqlen_k, limits)
        if not limits.num_speculative_tokens:
            return arrays
        drafts = StepDrafts.read(
            descriptor.spec_decode_metadata,
            query_start_loc=arrays.query_start_loc,
            seq_lens=arrays.seq_lens,
            row_ids=arrays.row_ids,
            sample_indices=arrays.sample_indices,
            vocab_size=limits.vocab_size,
        )
        return replace(arrays, drafts=drafts)

    def _check_shape(self, batch_size: int, limits: StepLimits) -> None:
        """Raises ValueError unless the arrays' sizes fit each other."""
        sizes = (len(self.query_start_loc) - 1, len(self.seq_lens), len(self.row_ids))
        _require(sizes == (batch_size,) * 3, f"arrays of {sizes} requests, not {batch_size}")
        _require(0 < batch_size <= limits.max_num_seqs, f"{batch_size} requests")
        _require(0 < self.num_tokens <= limits.max_num_batched_tokens, f"{self.num_tokens} tokens")

    def _check_values(self, max_seqlen_q: int, max_seqlen_k: int, limits: StepLimits) -> None:
        """Raises ValueError unless every value is in its range."""
        # Plain slices and as few reductions as will do: this runs on every step's critical path.
        q_lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        longest = int(q_lens.max())
        _require(int(q_lens.min()) > 0, "a request without a query token")
        _require(longest == max_seqlen_q, f"max_seqlen_q is {max_seqlen_q}, not {longest}")
        _require(
            self.query_start_loc[0] == 0 and self.query_start_loc[-1] == self.num_tokens,
            "query_start_loc does not run from 0 to num_tokens",
        )
        _require(int((self.seq_lens - q_lens).min()) >= 0, "a query longer than its sequence")
        longest = int(self.seq_lens.max())
        _require(longest == max_seqlen_k, f"max_seqlen_k is {max_seqlen_k}, not {longest}")
        _require(longest <= limits.max_model_len, f"a sequence of {longest} tokens")
        _require(_is_below(self.row_ids, limits.max_num_seqs), "a row that does not exist")
        samples = self.sample_indices
        if not len(samples):
            return
        _require(bool((samples[1:] > samples[:-1]).all()), "sample_indices that do not ascend")
        _require(
            samples[0] >= 0 and samples[-1] < len(self.seq_lens), "a sample index out of the batch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWrites:
    """Entries of the flattened block table to overwrite.

    entries: [2, n], indices and block ids.
    """

    entries: Int32Array

    @classmethod
    def read(
        cls, descriptor: BatchDescriptor, limits: StepLimits, *, num_blocks: int
    ) -> "BlockWrites | None":
        """Expands a descriptor's block-table updates; None when there are none.

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
        _require(len(rows) == len(offsets) == len(counts), "block-table updates of unequal length")
        ends = np.cumsum(counts)
        _require(len(ends) == 0 or ends[-1] == len(block_ids), "block ids missing or left over")
        width = limits.block_table_width
        _require(_is_below(rows, limits.max_num_seqs), "a block-table row that does not exist")
        _require(
            bool(((offsets >= 0) & (counts >= 0) & (offsets + counts <= width)).all()),
            f"a block-table update outside a row of {width} entries",
        )
        _require(_is_below(block_ids, num_blocks), "a block that does not exist")
        first = rows * width + offsets
        entries = np.empty((2, len(block_ids)), np.int32)
        entries[0] = np.repeat(first - (ends - counts), counts) + np.arange(len(block_ids))
        entries[1] = block_ids
        return cls(entries=entries)


def check_assignments(descriptor: BatchDescriptor, limits: StepLimits) -> None:
    """Raises ValueError unless every row that a step assigns exists and its tokens fit."""
    for assignment in descriptor.row_assignments:
        token_ids = read_int32(assignment.token_ids)
        _require(assignment.row < limits.max_num_seqs, f"assignment of row {assignment.row}")
        _require(
            0 < assignment.num_prompt_tokens <= len(token_ids) <= limits.max_model_len,
            f"assignment of {len(token_ids)} tokens, {assignment.num_prompt_tokens} of the prompt",
        )
        _require(_is_below(token_ids, limits.vocab_size), "a token outside the vocabulary")


def _require_supported(descriptor: BatchDescriptor, limits: StepLimits) -> None:
    """Raises ValueError if the step asks for what this worker did not announce."""
    num_spec_steps = descriptor.spec_decode_metadata.num_spec_steps
    _require(
        num_spec_steps == limits.num_speculative_tokens,
        f"num_spec_steps {num_spec_steps}, not {limits.num_speculative_tokens}",
    )
    _require(not descriptor.HasField("dp_metadata"), "data parallelism")


def _is_below(values: Int32Array | Int64Array, limit: int) -> bool:
    """Returns whether all values are in [0, limit)."""
    return not len(values) or bool(values.min() >= 0 and values.max() < limit)


def _require(condition: bool, found: str) -> None:
    """Raises ValueError that names what was found, unless the condition holds."""
    if not condition:
        raise ValueError(f"the step's descriptor is invalid: it has {found}")
