"""A worker without a model, for tests of the code around it.

`FakeWorker` keeps the tables of a real worker and models the content of the KV cache: what is
written for a position is a hash of all tokens up to it, as keys and values of a transformer depend
on all tokens before them. Before a request attends, every slot that it reads is compared with the
content that its own tokens dictate, so a wrong, stale or overwritten block raises
WorkerViolationError in the step that reads it. The next token is a hash of all tokens so far and
the seed: a request's output does not depend on what else runs, and `expected_output` computes it
without a worker.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from services.engine.batch import (
    BatchDescriptor,
    RowAssignment,
    RowSampling,
    StepFailure,
    StepResult,
    num_rows,
    pack_int32,
    read_int32,
    set_prompt_logprobs,
    step_result,
)
from services.engine.kv_cache.host_tier import DiskNews, HostLimits
from services.engine.kv_cache.state_blocks import StateBlocks
from tests.support.fake_cache import FakeCache
from tests.support.fake_images import FakeImages
from tests.support.fake_model import (
    VOCAB_SIZE,
    choose,
    extend,
    prompt_logprob,
    read_masks,
    require,
)
from tests.support.fake_model import WorkerViolationError as WorkerViolationError
from tests.support.fake_model import expected_output as expected_output

_UNKNOWN = -1


def expected_vector(prompt: Sequence[int]) -> list[float]:
    """Returns the vector that a worker which pools makes of a prompt."""
    return [float(sum(prompt)), float(len(prompt))]


class FakeWorker:
    """Runs steps as a worker would, one at a time and in order."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int = VOCAB_SIZE,
        windows: Sequence[int | None] = (None,),
        state_blocks: StateBlocks | None = None,
        num_cache_tokens: int | None = None,
        makes_drafts: bool = True,
        has_stages: bool = False,
        pools: bool = False,
        host: HostLimits | None = None,
        disk: dict[bytes, np.ndarray] | None = None,
    ) -> None:
        self._max_loads = 0 if host is None else host.max_step_loads
        self._has_stages = has_stages
        self._pools = pools
        self._makes_drafts = makes_drafts
        self._num_cache_tokens = num_cache_tokens or (num_blocks - 1) * block_size
        self._vocab_size = vocab_size
        self.memory_tokens = 2**31
        """Query tokens for which memory suffices; a step of more fails."""
        self._num_failed_steps = 0
        self._last_step_id = 0
        self._cache = FakeCache(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            state_blocks=state_blocks,
            num_host_slots=0 if host is None else host.num_slots,
            disk=disk,
        )
        self._images = FakeImages()
        self._tokens = np.full((max_num_seqs, max_model_len), _UNKNOWN, np.int32)
        # The content that the cache must have for each row and position; computed up to
        # _num_keys[row].
        self._keys = np.zeros((max_num_seqs, max_model_len), np.uint64)
        self._num_keys = [0] * max_num_seqs
        self._num_known = [0] * max_num_seqs
        self._num_computed: list[int | None] = [None] * max_num_seqs
        self._num_prompt = [0] * max_num_seqs
        self._sampling: list[RowSampling] = [RowSampling() for _ in range(max_num_seqs)]
        # Drafts of each row in the step under way; they follow its known tokens.
        self._num_drafts = [0] * max_num_seqs
        self._made: list[list[int]] = [[] for _ in range(max_num_seqs)]

    def execute(self, descriptor: BatchDescriptor) -> StepResult:
        """Runs one step.

        Raises:
            WorkerViolationError: the descriptor is inconsistent, or a request would read a slot
                that does not hold the keys and values of its own tokens.
        """
        require(
            descriptor.step_id == self._last_step_id + 1,
            f"step {descriptor.step_id} follows step {self._last_step_id}",
        )
        self._last_step_id = descriptor.step_id
        if descriptor.num_failed_steps < self._num_failed_steps:
            return StepResult(step_id=descriptor.step_id, failure=StepFailure.STEP_FAILURE_SKIPPED)
        require(descriptor.num_failed_steps == self._num_failed_steps, "num_failed_steps")
        if num_rows(descriptor) > self.memory_tokens:
            return self._fail(descriptor)
        self._cache.copy_blocks(descriptor.block_copies, max_loads=self._max_loads)
        if (
            not descriptor.context.batch_size
        ):  # it copies, or other data-parallel ranks have requests
            return StepResult(step_id=descriptor.step_id)
        self.update_tables(descriptor)
        self._cache.copy_states(descriptor.state_metadata)
        self._images.encode(descriptor.encoded_images)
        self._write_drafts(descriptor)
        rows, starts, ends = self._read_layout(descriptor)
        # All of a step's keys and values are written before any of its queries attends, layer by
        # layer, so a request may share blocks with one that computes them in the same step.
        spans = list(zip(rows, starts, ends, strict=True))
        self._images.check_reads(descriptor, spans)
        self._cache.write(spans, [self._row_keys(row, end) for row, _, end in spans])
        for row, start, end in spans:
            self._cache.check_reads(row, start, end, self._row_keys(row, end))
        if self._has_stages:
            self._check_last_tokens(descriptor, rows, ends)
        if self._pools:
            return self._pool(descriptor, rows, ends)
        result = self._sample(descriptor, rows, ends)
        if descriptor.sampling.prompt_logprob_requests:
            self._tell_prompts(descriptor, result, rows, starts, ends)
        return result

    def _pool(self, descriptor: BatchDescriptor, rows: list[int], ends: list[int]) -> StepResult:
        """Returns `expected_vector` of each request at the end of its prompt."""
        indices = read_int32(descriptor.sampling.sample_indices).tolist()
        due = [i for i, row in enumerate(rows) if ends[i] >= self._num_known[row]]
        require(indices == due, f"{indices} end, but {due} end at their last known token")
        vectors = [expected_vector(self._tokens[rows[i], : ends[i]].tolist()) for i in indices]
        pooled = vectors if indices else None
        return step_result(descriptor.step_id, [], elapsed_us=1, pooled=pooled)

    def _check_last_tokens(
        self, descriptor: BatchDescriptor, rows: list[int], ends: list[int]
    ) -> None:
        """Compares the tokens that stages receive with the tokens that the last one sampled."""
        indices = read_int32(descriptor.sampling.sample_indices).tolist()
        known = [int(self._tokens[rows[i], ends[i] - 1]) for i in indices]
        told = read_int32(descriptor.sampling.last_token_ids).tolist()
        require(told == known, f"stages receive tokens {told}; the last tokens are {known}")

    def _fail(self, descriptor: BatchDescriptor) -> StepResult:
        """Runs out of memory in the middle of a step, whose writes are then wrong."""
        self._num_failed_steps += 1
        attention = descriptor.attn_metadata
        rows, seq_lens = read_int32(attention.row_ids), self._seq_lens(descriptor)
        starts = dict(
            zip(rows, seq_lens - np.diff(read_int32(attention.query_start_loc)), strict=True)
        )
        self._cache.copy_blocks(descriptor.block_copies, max_loads=self._max_loads)
        self._images.spoil(descriptor.encoded_images)
        self._cache.spoil(
            attention.block_table_updates,
            starts,
            descriptor.state_metadata,
            descriptor.block_copies,
        )
        return StepResult(
            step_id=descriptor.step_id, failure=StepFailure.STEP_FAILURE_OUT_OF_MEMORY
        )

    @property
    def disk(self) -> dict[bytes, np.ndarray]:
        """The content of the blocks on disk."""
        return self._cache.disk

    def take_disk_news(self) -> DiskNews:
        """Ends all reads and returns what has happened on the disk since the last call."""
        return self._cache.take_disk_news()

    def restore(
        self, opening: BatchDescriptor, num_computed: Mapping[int, int], *, next_step_id: int
    ) -> None:
        """Takes over rows and blocks, but no content of the cache, before the first step."""
        self._last_step_id = next_step_id - 1
        self.update_tables(opening)
        for row, end in num_computed.items():
            self._num_computed[row] = end

    def update_tables(self, descriptor: BatchDescriptor) -> None:
        """Applies a step's changes of rows and block tables."""
        for assignment in descriptor.row_assignments:
            self._assign(assignment)
        self._cache.update_block_table(descriptor.attn_metadata.block_table_updates)

    def compute(self, row: int, tokens: range) -> None:
        """Writes keys and values of a row's tokens, whose predecessors must be there."""
        keys = self._row_keys(row, tokens.stop)
        self._cache.write([(row, tokens.start, tokens.stop)], [keys])
        self._cache.check_reads(row, tokens.start, tokens.stop, keys)

    def _assign(self, assignment: RowAssignment) -> None:
        row, token_ids = assignment.row, read_int32(assignment.token_ids)
        require(row < len(self._tokens), f"row {row} does not exist")
        require(0 < assignment.num_prompt_tokens <= len(token_ids), "a prompt token is missing")
        self._tokens[row] = _UNKNOWN
        self._tokens[row, : len(token_ids)] = token_ids
        self._cache.clear_row(row)
        self._images.assign(assignment)
        self._num_keys[row] = 0
        self._num_known[row] = len(token_ids)
        self._num_computed[row] = None
        self._num_prompt[row] = assignment.num_prompt_tokens
        self._sampling[row] = assignment.sampling

    def _read_layout(self, descriptor: BatchDescriptor) -> tuple[list[int], list[int], list[int]]:
        """Returns rows, first query positions and sequence lengths after checking them."""
        attention, context = descriptor.attn_metadata, descriptor.context
        bounds = read_int32(attention.query_start_loc)
        most = read_int32(attention.seq_lens)
        seq_lens = self._seq_lens(descriptor)
        rows = read_int32(attention.row_ids)
        q_lens = np.diff(bounds)
        starts = seq_lens - q_lens
        require(len(rows) == len(seq_lens) == len(q_lens) == context.batch_size > 0, "batch_size")
        require(len(set(rows.tolist())) == len(rows), "a row comes twice")
        require(bounds[0] == 0 and bool(np.all(q_lens > 0)), "query_start_loc is not rising")
        require(bool(np.all(starts >= 0)), "a query is longer than its sequence")
        require(context.num_tokens == bounds[-1], "num_tokens is not the last query_start_loc")
        require(context.max_q_len == attention.max_seqlen_q == q_lens.max(), "max_seqlen_q")
        require(attention.max_seqlen_k == most.max(), "max_seqlen_k")
        require(bool(np.all(seq_lens <= most)), "a sequence longer than was thought possible")
        if descriptor.HasField("graph_key"):
            require(descriptor.graph_key.graph_bs >= context.batch_size, "the graph is too small")
        prompt_lens = np.array([self._num_prompt[row] for row in rows])
        num_drafts = np.array([self._num_drafts[row] for row in rows])
        is_prefill = bool(np.any((starts < prompt_lens) | (q_lens - num_drafts > 1)))
        require(context.is_prefill == is_prefill, "is_prefill")
        for row, start, end in zip(rows.tolist(), starts.tolist(), seq_lens.tolist(), strict=True):
            known = self._num_known[row] + self._num_drafts[row]
            require(end <= known, f"row {row} has no token {end - 1}")
            require(end == known or not self._num_drafts[row], f"row {row} does not sample")
            computed = self._num_computed[row]
            require(computed in (None, start), f"row {row} goes on at {start}, not {computed}")
            self._num_computed[row] = end
        return rows.tolist(), starts.tolist(), seq_lens.tolist()

    def _seq_lens(self, descriptor: BatchDescriptor) -> np.ndarray:
        """Returns the sequence lengths; those of carried requests follow from their rows."""
        seq_lens = read_int32(descriptor.attn_metadata.seq_lens).copy()
        rows = read_int32(descriptor.attn_metadata.row_ids)
        metadata = descriptor.spec_decode_metadata
        for i in read_int32(metadata.carried_requests).tolist():
            seq_lens[i] = self._num_known[rows[i]] + read_int32(metadata.num_draft_tokens)[i]
        return seq_lens

    def _sample(self, descriptor: BatchDescriptor, rows: list[int], ends: list[int]) -> StepResult:
        indices = read_int32(descriptor.sampling.sample_indices).tolist()
        require(indices == sorted(set(indices)), "sample_indices are not ascending")
        known = [self._num_known[row] for row in rows]
        due = [i for i, row in enumerate(rows) if ends[i] >= known[i]]
        require(indices == due, f"{indices} sample, but {due} end at their last known token")
        masks = read_masks(descriptor, len(indices), self._vocab_size)
        sampling = descriptor.sampling
        params = [self._sampling[rows[i]] for i in indices]
        require(sampling.all_greedy == all(p.temperature == 0 for p in params), "all_greedy")
        edited = any(self._edits_logits(rows[i], known[i]) for i in indices)
        if not descriptor.spec_decode_metadata.carried_requests:
            require(sampling.needs_logit_edits == edited, "needs_logit_edits")
        require(sampling.needs_logit_edits or not edited, "needs_logit_edits")
        wanted = max((p.num_logprobs for p in params), default=-1)
        require(sampling.needs_logprobs == (wanted >= 0), "needs_logprobs")
        by_request = [
            self._verify(rows[i], known[i], masks.get(sample, frozenset()))
            for sample, i in enumerate(indices)
        ]
        tokens = [token_id for token_ids in by_request for token_id in token_ids]
        if wanted < 0:
            result = step_result(descriptor.step_id, tokens, elapsed_us=1)
        else:
            ranks = np.arange(wanted)
            result = step_result(
                descriptor.step_id,
                tokens,
                logprobs=[-0.5] * len(tokens),
                top_token_ids=(np.array(tokens)[:, None] + ranks) % self._vocab_size,
                top_logprobs=np.tile(-0.5 - ranks, (len(tokens), 1)),
                elapsed_us=1,
            )
        if descriptor.HasField("spec_decode_metadata"):
            num_steps = descriptor.spec_decode_metadata.num_spec_steps
            result.num_accepted_tokens = pack_int32([len(each) - 1 for each in by_request])
            if self._makes_drafts:
                drafts = [self._draft(rows[i], ends[i], num_steps) for i in indices]
                result.draft_token_ids = pack_int32(drafts)
        return result

    def _write_drafts(self, descriptor: BatchDescriptor) -> None:
        """Appends the drafts of a step to the known tokens of their rows."""
        self._num_drafts = [0] * len(self._num_drafts)
        if not descriptor.HasField("spec_decode_metadata"):
            return
        metadata = descriptor.spec_decode_metadata
        rows = read_int32(descriptor.attn_metadata.row_ids).tolist()
        counts = read_int32(metadata.num_draft_tokens).tolist()
        token_ids = read_int32(metadata.draft_token_ids)
        require(len(counts) == len(rows), "a request without its number of drafts")
        carried = set(read_int32(metadata.carried_requests).tolist())
        first = 0
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            require(count <= metadata.num_spec_steps, f"row {row} has {count} drafts")
            known = self._num_known[row]
            require(known + count <= self._tokens.shape[1], f"drafts of row {row} do not fit")
            drafts = self._made[row] if i in carried else token_ids[first:]
            require(len(drafts) >= count, f"row {row} has no drafts")
            self._tokens[row, known : known + count] = drafts[:count]
            self._num_drafts[row] = count
            first += 0 if i in carried else count
        require(first == len(token_ids), "drafts missing or left over")

    def _verify(self, row: int, position: int, masked: frozenset[int]) -> list[int]:
        """Samples after a row's known tokens and after each of its drafts that is confirmed."""
        require(not (masked and self._num_drafts[row]), f"row {row} has drafts beside a grammar")
        token_ids: list[int] = []
        for _ in range(self._num_drafts[row] + 1):
            require(position < self._tokens.shape[1], f"row {row} is full")
            token_ids.append(self._next_token(row, position, masked))
            drafted = self._tokens[row, position]
            self._tokens[row, position] = token_ids[-1]
            position += 1
            if drafted != token_ids[-1] or len(token_ids) > self._num_drafts[row]:
                break
        self._num_known[row] = position
        self._num_computed[row] = position - 1
        # Tokens from rejected drafts, and the leftovers of an earlier owner, are void.
        self._num_keys[row] = min(self._num_keys[row], position - 1)
        return token_ids

    def _draft(self, row: int, end: int, num_steps: int) -> list[int]:
        """Guesses the token after a row's newest one, two times in three rightly."""
        room = min(self._tokens.shape[1] - 1, self._num_cache_tokens)
        self._cache.require_room(row, end, max(end, min(end + num_steps - 1, room)))
        position = self._num_known[row]
        key = int(self._row_keys(row, position)[position - 1])
        token_ids: list[int] = []
        for _ in range(num_steps):
            token_id = choose(key, self._sampling[row].seed, frozenset(), self._vocab_size)
            is_wrong = extend(key, 1) % 3 == 0
            token_ids.append((token_id + is_wrong) % self._vocab_size)
            key = extend(key, token_ids[-1])
        self._made[row] = token_ids if self._makes_drafts else []
        return token_ids

    def _tell_prompts(
        self, descriptor: BatchDescriptor, result: StepResult,
        rows: list[int], starts: list[int], ends: list[int],
    ) -> None:  # fmt: skip
        """Adds log-probabilities of prompt tokens, as `prompt_logprob` computes them."""
        requests = read_int32(descriptor.sampling.prompt_logprob_requests).tolist()
        require(requests == sorted(set(requests)), "prompt_logprob_requests do not ascend")
        tokens: list[int] = []
        for i in requests:
            count = min(ends[i], self._num_prompt[rows[i]] - 1) - starts[i]
            require(count > 0, "a prompt without a token to tell of")
            tokens += self._tokens[rows[i], starts[i] + 1 : starts[i] + 1 + count].tolist()
        ranks = np.arange(descriptor.sampling.num_prompt_logprobs)
        set_prompt_logprobs(
            result,
            [prompt_logprob(token_id) for token_id in tokens],
            np.array(tokens)[:, None] + ranks,
            np.tile(-0.5 - ranks, (len(tokens), 1)),
        )

    def _next_token(self, row: int, end: int, masked: frozenset[int]) -> int:
        sampling = self._sampling[row]
        forbidden = masked
        if end - self._num_prompt[row] < sampling.min_tokens:
            forbidden |= frozenset(read_int32(sampling.end_token_ids).tolist())
        key = int(self._row_keys(row, end)[end - 1])
        return choose(key, sampling.seed, forbidden, self._vocab_size)

    def _edits_logits(self, row: int, position: int) -> bool:
        """Whether the logits that lead to the row's token at a position must be changed."""
        sampling = self._sampling[row]
        num_output = position - self._num_prompt[row]
        return bool(
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.bias_token_ids
            or (sampling.end_token_ids and num_output < sampling.min_tokens)
        )

    def _row_keys(self, row: int, end: int) -> np.ndarray:
        """Returns the content that the cache must have for the row's tokens; valid up to `end`."""
        first = self._num_keys[row]
        if first < end:
            key = int(self._keys[row, first - 1]) if first else 0
            for position in range(first, end):
                token_id = int(self._tokens[row, position])
                key = extend(key, self._images.meaning(row, position, token_id))
                self._keys[row, position] = key
            self._num_keys[row] = end
        return self._keys[row]
