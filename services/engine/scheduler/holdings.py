"""Rows and blocks of running requests, and the waiting requests."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.kv_cache.cache import KVCache, Prefix
from services.engine.kv_cache.host_tier import HostLimits, HostTier
from services.engine.kv_cache.prefix_journal import BlockJournal
from services.engine.kv_cache.tiered_cache import TieredKVCache
from services.engine.limits import StepLimits
from services.engine.request import MAX_PRIORITY, Request, RequestStatus, StepMark
from services.engine.request_times import Stage
from services.engine.scheduler.adapter_slots import AdapterSlots
from services.engine.scheduler.decodes import DecodeColumns
from services.engine.scheduler.encoder_cache import EncoderCache
from services.engine.scheduler.image_plan import ImagePlan
from services.engine.scheduler.parked_requests import ParkedRequests
from services.engine.scheduler.sampling_needs import sampling_needs
from services.engine.scheduler.stats import SchedulerCounts
from services.engine.scheduler.waiting_queue import WaitingQueue, rank_s, service_order

MAX_OVERTAKINGS = 3
"""Admissions of later arrivals before the waiting request that arrived first is next."""

_NUM_RECENT = 64
_MIN_RETRY_MS = 50
_MAX_RETRY_MS = 5000
_UNKNOWN_RETRY_MS = 1000


class Holdings:
    """Moves requests between waiting, running and finished, with their rows and blocks.

    running: requests that hold a row and blocks, in service order. parked: live requests that wait
    for the disk. waiting: all others that are live. cache: the blocks. tiers: the same with the
    host's memory; None without any. num_cache_tokens: most tokens of a request that holds all
    blocks. images: the encoded images of running requests. adapters: the slots of their adapters.
    row_needs: `sampling_needs` of the request in each row. decodes: columns of steps.
    end_token_ids: of all requests that ever ran. last_mark: of the last step that sampled.
    num_moves: how often a request started to run, or stopped. left_rows: of requests that stopped;
    SharedPrefixFinder empties it.
    """

    def __init__(  # noqa: PLR0913  the settings of a scheduler
        self,
        limits: StepLimits,
        counts: SchedulerCounts,
        *,
        num_blocks: int,
        enable_prefix_caching: bool,
        priority_ageing_s: float,
        clock: Callable[[], float],
        journal: BlockJournal | None = None,
        host: HostLimits | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": limits.block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "groups": limits.cache_groups,
            "state_blocks": limits.state_blocks,
            "journal": journal,
        }
        self.tiers: TieredKVCache | None = None
        if host is not None and host.num_slots and enable_prefix_caching:
            self.tiers = TieredKVCache(
                HostTier(host, counts.tiers), disk=host.disk_entries, **settings
            )
        self.cache = self.tiers or KVCache(**settings)
        self.images = ImagePlan(
            EncoderCache(limits.num_encoder_pages),
            limits.max_encoder_tokens,
            counts,
            computes_whole=limits.max_whole_tokens > 0,
        )
        self.adapters = adapters or AdapterSlots(limits.num_adapter_slots, counts)
        self.num_cache_tokens = limits.num_cache_tokens(num_blocks)
        self.waiting = WaitingQueue()
        self.parked = ParkedRequests()
        self.running: list[Request] = []
        self.num_moves = 0
        self.left_rows: set[int] = set()
        self.row_needs = [0] * limits.max_num_seqs
        self.decodes = DecodeColumns(self.row_needs)
        self.end_token_ids: set[int] = set()
        self.last_mark: StepMark | None = None
        self.finish_rate = FinishRate()
        self.counts = counts
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._has_ended = False
        self._num_added = 0
        self._num_overtakings = 0
        self._priority_ageing_s = priority_ageing_s
        self._clock = clock
        self._max_model_len = limits.max_model_len
        self._is_pooling = limits.pooling is not None
        self._block_size = limits.block_size
        self._num_groups = limits.num_groups
        self._num_state_blocks = limits.num_state_blocks
        self._has_plain_decodes = limits.num_stages == 1 and not limits.num_speculative_tokens
        self._prompts: list[Request] = []

    def bound_tokens(self, request: Request) -> int:
        """Returns how many tokens a request can reach, prompt and output together.

        That is the least of what it asks for, of max_model_len and of what the KV cache holds when
        the request has it to itself. The last token's keys and values are never needed, so it may
        be one more than the cache holds.

        Raises:
            InvalidRequestError: the prompt alone is too long for the model or for the KV cache.
        """
        num_prompt_tokens = request.num_prompt_tokens
        # A vector takes no place after the prompt.
        most = self._max_model_len - (not self._is_pooling)
        if num_prompt_tokens > most:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; it may have {most} under "
                f"max_model_len, which is {self._max_model_len}"
            )
        if num_prompt_tokens > self.num_cache_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens; "
                f"the KV cache holds {self.num_cache_tokens}"
            )
        if self._is_pooling:
            return num_prompt_tokens + 1  # the vector takes the place of a token
        wanted = num_prompt_tokens + request.sampling.max_tokens
        return min(wanted, self._max_model_len, self.num_cache_tokens + 1)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn or for the disk."""
        return len(self.waiting) + len(self.parked)

    @property
    def prompts(self) -> Sequence[Request]:
        """Running requests that have not computed all of their prompts; to be read in each step."""
        running = RequestStatus.RUNNING
        self._prompts = [
            each
            for each in self._prompts
            if each.status is running and each.num_computed_tokens < each.num_prompt_tokens
        ]
        return self._prompts

    def now_s(self) -> float:
        """Returns the time of the scheduler's clock."""
        return self._clock()

    def rank(self, request: Request) -> None:
        """Gives a new request its place in the service order."""
        now_s = self._clock()
        request.times.enter(Stage.QUEUED, now_s)
        request.rank_s = rank_s(now_s, request.priority, self._priority_ageing_s)
        request.arrival_index = self._num_added
        self._num_added += 1

    def next_waiting(self) -> Request | None:
        """Returns the request to admit next, or None if no request waits.

        It is the first in service order or, after `MAX_OVERTAKINGS` admissions of later arrivals,
        the one that arrived first. That one gets a rank before all later arrivals, so that they do
        not preempt it either.
        """
        first = self.waiting.peek()
        if first is None or first.is_suspect or self._num_overtakings < MAX_OVERTAKINGS:
            return first
        oldest = self.waiting.oldest()
        assert oldest is not None, "a request waits"
        if oldest is not first:
            highest = rank_s(self._clock(), MAX_PRIORITY, self._priority_ageing_s)
            self.waiting.promote(oldest, min(first.rank_s, highest))
        return oldest

    def start(self, request: Request, prefix: Prefix, num_tokens: int) -> int:
        """Starts the next waiting request; returns its row.

        Args:
            request: the result of `next_waiting`.
            prefix: its tokens that are already computed.
            num_tokens: tokens that its blocks must hold, with the prefix; they fit.
        """
        self._num_overtakings += 1
        if request is self.waiting.oldest():
            self._num_overtakings = 0
        self.waiting.pop()
        self.cache.take_prefix(request, prefix, num_tokens)
        self.counts.num_snapshots_used += prefix.snapshot is not None
        self.counts.recomputed_tokens += max(0, prefix.junction - prefix.num_tokens)
        request.num_computed_tokens = prefix.num_tokens
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=service_order)
        self.adapters.take(request.adapter)
        row = self._free_rows.pop()
        request.row = row
        self.num_moves += 1
        self.row_needs[row] = sampling_needs(request.sampling)
        self.end_token_ids |= request.sampling.end_token_ids
        self._prompts.append(request)
        return row

    def decode_plainly(self, request: Request) -> None:
        """Lets the next steps decode a request that samples now, until something is due for it.

        Nothing is before its block is full, its state is to be saved, or it has all of its tokens.
        Requests with log-probabilities or masks need some work in each step.
        """
        if (
            not self._has_plain_decodes
            or request.constraint is not None
            or request.sampling.logprobs is not None
        ):
            return
        end, states = request.max_num_tokens - 1, self.cache.states
        if self._num_groups:
            end = min(end, len(request.block_ids) // self._num_groups * self._block_size)
        if states is not None and states.is_caching:
            end = min(end, -(-request.num_computed_tokens // states.interval) * states.interval)
        request.num_plain_tokens = end

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extends a running request's blocks to its first `num_tokens` tokens.

        Preempts the last running requests if none are free.

        Returns:
            The blocks added, if any; None if the request itself was the last and was preempted.
        """
        if num_tokens * self._num_groups <= len(request.block_ids) * self._block_size:
            return []
        self.cache.cache_full_blocks(request)
        while (added := self.cache.allocate(request, num_tokens)) is None:
            if self.preempt_last() is request:
                return None
        return added

    def room_after(self, request: Request) -> int:
        """Returns the free blocks after all requests and this new one have those of their tokens.

        Negative if some must wait. Blocks with its prefix are no loss.
        """
        live = (*self.running, *self.waiting, *self.parked)
        num_wanted = sum(-(-len(each.token_ids) // self._block_size) for each in (*live, request))
        num_held = sum(len(each.block_ids) + len(each.state_block_ids) for each in live)
        num_held += len(self.cache.match_prefix(request).block_ids)
        num_of_states = (len(live) + 1) * self._num_state_blocks
        num_wanted = num_wanted * self._num_groups + num_of_states
        return self.cache.num_free_blocks - num_wanted + num_held

    def preempt_last(self) -> Request:
        """Preempts the last running request; it starts over at its next turn."""
        request = self.running.pop()
        self._release(request)
        request.times.enter(Stage.QUEUED, self._clock())
        request.times.num_recomputed_tokens += request.num_computed_tokens
        request.num_computed_tokens = request.num_plain_tokens = 0
        request.draft_token_ids = []
        request.num_held_drafts = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.waiting.push(request)
        self.counts.num_preemptions += 1
        return request

    def change_weights(self, salt: bytes, *, keeps_cache: bool) -> None:
        """Parts all requests from what other weights have cached; no step is in flight.

        Args:
            salt: of the new weights.
            keeps_cache: whether running requests keep their blocks; else they start over.
        """
        while self.running and not keeps_cache:
            self.preempt_last()
        for request in (*self.waiting, *self.parked):
            request.weights_salt = salt
            request.block_keys.clear()
        if not keeps_cache:
            self.images.forget()

    def let_go(self) -> None:
        """Forgets ended requests of the last step; no request runs."""
        self._prompts.clear()
        self.decodes.next([])

    def end(self, request: Request) -> None:
        """Ends a running or waiting request; `drop_ended` removes it from the running list."""
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if was_running:
            self._has_ended = True
            self._release(request)
        elif not self.parked.discard(request):
            self.waiting.discard(request)
        self.finish_rate.record(self._clock())

    def drop_ended(self) -> None:
        """Removes all ended requests from the running list at once."""
        if self._has_ended:
            running = RequestStatus.RUNNING
            self.running = [r for r in self.running if r.status is running]
            self._has_ended = False

    def _release(self, request: Request) -> None:
        assert request.row is not None, "a running request has a row"
        self.cache.free(request)
        self.images.drop(request)
        self.adapters.release(request.adapter)
        self._free_rows.append(request.row)
        self.left_rows.add(request.row)
        request.row = None
        self.num_moves += 1


class FinishRate:
    """Records when recent requests ended; each end makes room for a waiting request."""

    def __init__(self) -> None:
        self._finish_times_s: deque[float] = deque(maxlen=_NUM_RECENT)

    def record(self, now_s: float) -> None:
        """Records the end of a request."""
        self._finish_times_s.append(now_s)

    def retry_after_ms(self, now_s: float) -> int:
        """Returns the mean time between recent ends, in milliseconds from 50 to 5000."""
        if not self._finish_times_s:
            return _UNKNOWN_RETRY_MS
        mean_s = (now_s - self._finish_times_s[0]) / len(self._finish_times_s)
        return int(min(max(1000 * mean_s, _MIN_RETRY_MS), _MAX_RETRY_MS))
