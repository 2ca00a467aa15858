"""Draft tokens in the scheduler: how many a step verifies, and which tokens remain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.engine.batch import BatchDescriptor, StepResult, read_int32
from services.engine.request import Request, RequestStatus
from services.engine.spec_decode.carried_drafts import CarriedDrafts
from services.engine.spec_decode.draft_length import DraftLength
from services.engine.spec_decode.ngram_index import NgramIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Speculation in the scheduler.

    num_tokens: drafts of each request. max_seq_len: most tokens of a request in a step, drafts
    included, that fit the model and the KV cache. num_written_ahead: tokens past a step's last for
    which drafting writes cache entries. lookup_sizes: the shortest and the longest n-gram
    that the scheduler itself looks up; None where the worker makes the drafts.
    """

    num_tokens: int
    max_seq_len: int
    num_written_ahead: int
    lookup_sizes: tuple[int, int] | None = None
    length: DraftLength | None = None
    """Chooses how many drafts the next step has; None means num_tokens."""
    rows: CarriedDrafts | None = None
    """The drafts of rows; None where the scheduler makes them."""

    def choose(self, running: Sequence[Request]) -> int:
        """Returns the drafts of each running request after the next step."""
        if self.length is None:
            return self.num_tokens
        return self.length.choose(len(running), most=most_drafts(running, self.num_tokens))

    def must_wait(self, request: Request) -> bool:
        """Whether a running request can go on only when the result of its last step is back.

        Otherwise the worker carries on: its row has the newest token and the drafts. The step in
        flight may accept all of its drafts, and the next ones must have room then.
        """
        num_pending = request.num_pending_tokens
        if not num_pending or len(request.token_ids) + num_pending >= request.max_num_tokens:
            return False  # nothing is unknown, or nothing is left to do
        if self.rows is None or request.constraint is not None or num_pending > 1:
            return True
        most = len(request.token_ids) + num_pending + request.num_pending_drafts
        return most + request.num_carried_drafts > self.max_seq_len

    def complete(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Names in a descriptor what was carried; see `CarriedDrafts`."""
        if self.rows is not None:
            self.rows.complete(descriptor, result)

    def observe(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Takes what a step's drafts brought and what the step cost."""
        if self.length is not None:
            observe(self.length, [(descriptor, result)])

    def reach(self, end: int) -> int:
        """Returns how many tokens a request's blocks must hold to compute up to `end`."""
        return max(end, min(end + self.num_written_ahead, self.max_seq_len))

    def settle(
        self,
        requests: Sequence[Request],
        num_drafts: Sequence[int],
        result: StepResult,
        num_next: int,
    ) -> None:
        """Gives requests that sampled in a step and still run their next drafts.

        Their newest token was sampled and all tokens before it are computed. Entries computed for
        rejected drafts are void. Each request will verify the drafts that it has room for, at
        most `num_next`; a request that was carried into the next step verifies them already.

        Args:
            requests: the requests that sampled, in order.
            num_drafts: drafts of each in the step.
            result: of the step.
            num_next: drafts that the step made for each.
        """
        accepted = read_int32(result.num_accepted_tokens)
        made = read_int32(result.draft_token_ids).reshape(-1, self.num_tokens).tolist()
        for index, request in enumerate(requests):
            request.num_pending_drafts -= num_drafts[index]
            if request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = len(request.token_ids)
            num_in_flight = request.num_pending_tokens + request.num_pending_drafts
            request.num_held_drafts = int(accepted[index])
            request.num_computed_tokens = num_tokens + num_in_flight - 1
            wanted = request.sampling.num_speculative_tokens
            most = num_next if wanted is None else min(wanted, num_next)
            room = max(0, min(self.max_seq_len - num_tokens, most))
            if self.lookup_sizes is None:
                request.draft_token_ids = made[index][:room]
            else:
                request.draft_token_ids = self._look_up(request, self.lookup_sizes, room)

    def _look_up(self, request: Request, sizes: tuple[int, int], room: int) -> list[int]:
        """Returns at most `room` tokens that followed the request's last tokens before."""
        if request.constraint is not None and not request.constraint.num_free_tokens:
            return []
        if request.ngrams is None:
            request.ngrams = NgramIndex(sizes, max_num_tokens=request.max_num_tokens)
        return request.ngrams.following(request.token_ids, room)


def most_drafts(running: Iterable[Request], num_tokens: int) -> int:
    """Returns how many of `num_tokens` drafts any running request would verify at most.

    All of them if none runs yet: those to come may.
    """
    most = None
    for request in running:
        constraint, wanted = request.constraint, request.sampling.num_speculative_tokens
        own = num_tokens if wanted is None else wanted
        if constraint is not None:
            own = min(own, constraint.num_free_tokens)
        if own >= num_tokens:
            return num_tokens
        most = own if most is None else max(most, own)
    return num_tokens if most is None else most


def observe(length: DraftLength, parts: Sequence[tuple[BatchDescriptor, StepResult]]) -> None:
    """Takes what a step's drafts brought and what the step cost.

    Args:
        length: what chooses the number of drafts.
        parts: the step and its result, of each data-parallel rank.
    """
    metadata = [descriptor.spec_decode_metadata for descriptor, _ in parts]
    num_drafts = [read_int32(each.num_draft_tokens) for each in metadata]
    sampling = [read_int32(descriptor.sampling.sample_indices) for descriptor, _ in parts]
    length.observe_drafts(
        np.concatenate([drafts[own] for drafts, own in zip(num_drafts, sampling, strict=True)]),
        np.concatenate([read_int32(result.num_accepted_tokens) for _, result in parts]),
    )
    most, num_next = max(each.max(initial=0) for each in num_drafts), metadata[0].num_next_drafts
    # A step between two lengths, or with prompts, says nothing about either.
    if most == num_next and not any(descriptor.context.is_prefill for descriptor, _ in parts):
        elapsed_us = max(result.elapsed_us for _, result in parts)
        length.observe_cost(max(map(len, num_drafts)), num_next, elapsed_us)
