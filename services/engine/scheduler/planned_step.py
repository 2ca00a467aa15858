"""A step while it is planned, and a step in flight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    SpecDecodeMetadata,
    StepImage,
    pack_int32,
    read_int32,
    row_assignment,
)
from services.engine.config.scheduler import PROMPT_SHARE
from services.engine.prompt_image import EncoderImage
from services.engine.request import Request
from services.engine.scheduler.decodes import Decodes
from services.engine.scheduler.dispatcher import BatchShape, GraphDispatcher
from services.engine.scheduler.image_plan import ImagePlan, encoding_order
from services.engine.scheduler.sampling_needs import (
    LOGIT_EDITS,
    LOGPROBS,
    MIN_TOKENS,
    RANDOM,
    num_short,
)

MAX_PROMPT_LOGPROBS = 4096
"""Most prompt log-probabilities in one step: each blocks the event loop for about 5 us."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens whose log-probabilities a step computes: `count` from position `start` on."""

    request: Request
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """A step that was sent and has no result yet."""

    step_id: int
    descriptor: BatchDescriptor
    requests: list[Request]
    """Requests that sample, in the order of the result."""
    decodes: Decodes | None = None
    """Those of them that are sure to get one token and nothing else; None for none."""
    first_decode: int = 0
    """Index of the first of these in `requests`."""
    unsampled: list[Request]
    """Requests that compute part of their tokens and do not sample, in the order of the batch."""
    prompt_spans: Sequence[PromptSpan] = ()
    """Prompt tokens with log-probabilities in the result, in its order."""
    sees_images: bool = False
    """Whether inputs or positions of some tokens depend on images."""
    encoded_images: Sequence[EncoderImage] = ()
    """Images that the step encodes: workers read their patches until the result is here."""
    others: Sequence["ScheduledStep"] = ()
    """The steps that the other data-parallel ranks run at the same time, in their order."""

    @property
    def decodes_at(self) -> slice:
        """The indices of the decodes in `requests`."""
        num_decodes = 0 if self.decodes is None else len(self.decodes.requests)
        return slice(self.first_decode, self.first_decode + num_decodes)

    @property
    def has_requests(self) -> bool:
        """Whether any rank computes a request's token; else the step only copies blocks."""
        return any(each.requests or each.unsampled for each in (self, *self.others))

    @property
    def num_drafts(self) -> Sequence[int]:
        """Drafts of each request that samples."""
        counts = read_int32(self.descriptor.spec_decode_metadata.num_draft_tokens)
        if not len(counts):
            return [0] * len(self.requests)
        sampling = read_int32(self.descriptor.sampling.sample_indices)
        num_drafts: list[int] = counts[sampling].tolist()
        return num_drafts

    def starts(self) -> Iterator[tuple[Request, int]]:
        """Yields each request of the step and the number of its tokens computed before the step.

        Of a request that samples at least its last known token was not computed; a carried one may
        have computed fewer than the descriptor says.
        """
        attention = self.descriptor.attn_metadata
        starts = read_int32(attention.seq_lens) - np.diff(read_int32(attention.query_start_loc))
        sampling = np.zeros(len(starts), bool)
        sampling[read_int32(self.descriptor.sampling.sample_indices)] = True
        for request, start in zip(self.requests, starts[sampling].tolist(), strict=True):
            yield request, min(start, len(request.token_ids) - 1)
        yield from zip(self.unsampled, starts[~sampling].tolist(), strict=True)


class PlannedStep:
    """A step while it is planned: the tokens of each request, and the remaining budget."""

    def __init__(
        self,
        budget: int,
        row_needs: Sequence[int],
        images: ImagePlan,
        *,
        num_spec_steps: int = 0,
        num_next_drafts: int = 0,
        last_tokens_travel: bool = False,
    ) -> None:
        """Starts a step without requests.

        Args:
            budget: most query tokens.
            row_needs: `sampling_needs` of the request in each row.
            images: has the images of the requests' next tokens.
            num_spec_steps: most draft tokens of a request.
            num_next_drafts: draft tokens to guess for each request that samples.
            last_tokens_travel: whether the step says the newest token of each request that samples.
        """
        self._last_tokens_travel = last_tokens_travel
        self.budget = budget
        self._share = budget // PROMPT_SHARE
        self._eldest_index: int | None = None
        self._logprob_room = MAX_PROMPT_LOGPROBS
        self._row_needs = row_needs
        self._images = images
        self._sees_images = False
        self._batch = BatchBuilder()
        self.add_blocks = self._batch.update_blocks
        self._sampling: list[Request] = []
        self._decodes: Decodes | None = None
        self._first_decode = 0
        self._prompt_spans: list[PromptSpan] = []
        self._unsampled: list[Request] = []
        self._is_prefill = False
        self._needs = 0
        self._num_spec_steps = num_spec_steps
        self._num_next_drafts = num_next_drafts
        self._num_drafts: list[int] = []
        self._draft_token_ids: list[int] = []
        self._carried: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not self._batch.num_requests

    def bound(self, q_len: int, running: Sequence[Request], index: int) -> int:
        """Returns how many of a request's next tokens fit.

        Each later request keeps one token. The prompt that arrived first keeps a share of the
        budget from prompts of higher priority.

        Args:
            q_len: tokens that the request has to compute, at least 2.
            running: the running requests, in service order.
            index: the request's index in `running`.
        """
        room = self.room(running, index)
        if q_len > room - self._share:
            if self._eldest_index is None or self._eldest_index >= len(running):  # preempted since
                self._eldest_index = _eldest_prompt(running, index)
            if index < self._eldest_index:
                room -= min(self._share, _num_left(running[self._eldest_index]))
        return self.bound_logprobs(running[index], min(q_len, max(room, 1)))

    def room(self, running: Sequence[Request], index: int) -> int:
        """Returns the most tokens of the running request at an index; later ones keep one each."""
        return self.budget - (len(running) - index - 1)

    def bound_logprobs(self, request: Request, q_len: int) -> int:
        """Returns how many of a request's next tokens fit under `MAX_PROMPT_LOGPROBS`."""
        if not request.needs_prompt_logits:
            return q_len
        return min(q_len, max(1, self._logprob_room // _num_prompt_logprobs(request)))

    def assign_row(self, row: int, request: Request, adapter_slot: int) -> None:
        """Adds a request that takes a row in this step; adapter_slot is one more than its slot."""
        self._batch.row_assignments.append(
            row_assignment(
                row=row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                images=request.images,
                adapter_slot=adapter_slot,
            )
        )

    def decode(self, decodes: Decodes) -> None:
        """Adds requests past their prompts, with a block for their token, no drafts and no mask.

        Their counts and the budget are already updated.
        """
        self._decodes, self._first_decode = decodes, len(self._sampling)
        self._batch.decode(decodes.rows, decodes.seq_lens, longest=decodes.longest)
        self._needs |= decodes.needs

    def compute(self, request: Request, row: int, q_len: int, num_tokens: int) -> None:
        """Adds the next tokens of a request, which samples if these are its last known tokens.

        Args:
            request: a request with blocks for these tokens.
            row: its row.
            q_len: tokens to compute, first drafts included; at least 1 and within the budget.
            num_tokens: all its tokens, known and pending, with the drafts in flight.
        """
        batch = self._batch
        index = batch.num_requests
        start = request.num_computed_tokens
        end = start + q_len
        num_drafts, num_pending = 0, request.num_pending_tokens
        if end >= num_tokens:
            num_drafts = end - num_tokens
            if request.constraint is not None and request.needs_mask:
                assert request.constraint.mask is not None, "the scheduler waits for the mask"
                batch.grammar_rows.append(len(batch.sample_indices) + batch.num_decodes)
                batch.grammar_masks.append(request.constraint.mask)
            batch.sample_indices.append(index)
            self._sampling.append(request)
            self._count_needs(request, row, len(request.token_ids) + num_pending)
            request.num_pending_tokens += 1
            request.num_pending_drafts += num_drafts
        else:
            self._unsampled.append(request)
        batch.row_ids.append(row)
        batch.q_lens.append(q_len)
        batch.seq_lens.append(end)
        request.num_computed_tokens = end
        self.budget -= q_len
        if request.images and start < request.images[-1].end:
            self._see_images(request, index, start, end)
        if q_len - num_drafts > 1 or start < request.num_prompt_tokens:
            self._is_prefill = True
            if request.needs_prompt_logits:
                self._ask_for_prompt(request, index, start, end)
        if self._num_spec_steps:
            self._num_drafts.append(num_drafts)
            request.num_carried_drafts = self._num_wanted(request)
            if num_pending:
                self._carried.append(index)
            else:
                self._draft_token_ids += request.draft_token_ids[:num_drafts]

    def _see_images(self, request: Request, index: int, start: int, end: int) -> None:
        """Adds the images of the tokens of a request, which has this index in the step."""
        self._sees_images = True
        self._batch.images += [
            StepImage(request=index, image=number, pages=pack_int32(pages))
            for number, pages in self._images.used(request, start, end)
        ]

    def _num_wanted(self, request: Request) -> int:
        """Returns how many of the drafts that the step makes a request will verify."""
        wanted = request.sampling.num_speculative_tokens
        return self._num_next_drafts if wanted is None else min(wanted, self._num_next_drafts)

    def _count_needs(self, request: Request, row: int, num_tokens: int) -> None:
        needs = self._row_needs[row]
        if needs & MIN_TOKENS and num_short(request, num_tokens) <= 0:
            needs -= MIN_TOKENS
        self._needs |= needs

    def _ask_for_prompt(self, request: Request, index: int, start: int, end: int) -> None:
        """Requests the log-probabilities of the prompt tokens from `start` + 1 to `end`."""
        count = min(end, request.num_prompt_tokens - 1) - start
        if count > 0:
            batch = self._batch
            batch.prompt_logprob_requests.append(index)
            num_top = request.sampling.prompt_logprobs or 0
            self._logprob_room -= count * _num_prompt_logprobs(request)
            batch.num_prompt_logprobs = max(batch.num_prompt_logprobs, num_top)
            self._prompt_spans.append(PromptSpan(request, start + 1, count))

    def order(self, step_id: int, dispatcher: GraphDispatcher) -> ScheduledStep:
        """Returns the finished step with its graph."""
        batch = self._batch
        batch.all_greedy = not self._needs & RANDOM
        batch.needs_logit_edits = bool(self._needs & (LOGIT_EDITS | MIN_TOKENS))
        batch.needs_logprobs = bool(self._needs & LOGPROBS)
        if self._last_tokens_travel:
            batch.last_token_ids = [request.token_ids[-1] for request in self._sampling]
        if self._num_spec_steps:
            batch.drafts = SpecDecodeMetadata(
                draft_token_ids=pack_int32(self._draft_token_ids),
                num_spec_steps=self._num_spec_steps,
                num_draft_tokens=pack_int32(self._num_drafts),
                num_next_drafts=self._num_next_drafts,
                carried_requests=pack_int32(self._carried),
            )
        dispatch = dispatcher.dispatch(
            BatchShape(
                num_tokens=sum(batch.q_lens) + batch.num_decodes,
                batch_size=batch.num_requests,
                max_q_len=max(batch.q_lens, default=1),
                sees_images=self._sees_images,
                sees_whole_images=self._sees_images and self._images.computes_whole,
            )
        )
        descriptor = batch.build(
            step_id=step_id,
            is_prefill=self._is_prefill,
            graph_key=dispatch.graph_key,
            fallback_reason=dispatch.fallback_reason,
        )
        encoded = self._images.take_ordered()
        descriptor.encoded_images.extend(encoding_order(*each) for each in encoded)
        return ScheduledStep(
            step_id=step_id,
            descriptor=descriptor,
            requests=self._requests(),
            decodes=self._decodes,
            first_decode=self._first_decode,
            prompt_spans=self._prompt_spans,
            unsampled=self._unsampled,
            sees_images=self._sees_images,
            encoded_images=[image for image, _ in encoded],
        )

    def _requests(self) -> list[Request]:
        """Returns the requests that sample, in the order of the step."""
        if self._decodes is None:
            return self._sampling
        if not self._sampling:
            return self._decodes.requests
        before, after = self._sampling[: self._first_decode], self._sampling[self._first_decode :]
        return [*before, *self._decodes.requests, *after]


def _eldest_prompt(running: Sequence[Request], first: int) -> int:
    """Returns the index of the earliest arrival among requests with several tokens to compute.

    The search starts at `first`, which is the index of such a request.
    """
    places = (i for i in range(first, len(running)) if _num_left(running[i]) > 1)
    return min(places, key=lambda i: running[i].arrival_index, default=first)


def _num_prompt_logprobs(request: Request) -> int:
    """Returns the log-probabilities of one prompt token: its own and the likeliest."""
    return 1 + (request.sampling.prompt_logprobs or 0)


def _num_left(request: Request) -> int:
    """Returns how many tokens a request has to compute, without drafts."""
    return len(request.token_ids) + request.num_pending_tokens - request.num_computed_tokens
