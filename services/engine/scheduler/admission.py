"""Admits waiting requests to a step."""

from collections.abc import Callable

from services.engine.kv_cache.cache import NO_PREFIX, Prefix
from services.engine.kv_cache.tiered_cache import TieredKVCache
from services.engine.limits import StepLimits
from services.engine.request import Request, StepMark
from services.engine.request_times import Stage
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import PlannedStep
from services.engine.scheduler.recovery import Recovery
from services.engine.spec_decode.draft_plan import DraftPlan


class Admission:
    """Starts waiting requests, in service order, as far as tokens, rows and blocks go.

    A request is admitted only if blocks for all of its tokens are free, even if it takes them
    chunk by chunk: otherwise it would be preempted again and again.
    """

    def __init__(
        self,
        limits: StepLimits,
        holdings: Holdings,
        recovery: Recovery,
        *,
        drafts: DraftPlan | None,
        enable_prefix_caching: bool,
        clock: Callable[[], float],
    ) -> None:
        """Starts without requests.

        Args:
            limits: of steps and sequences.
            holdings: has the waiting and the running requests.
            recovery: says whether a suspect must run alone.
            drafts: says which blocks drafts need; None without speculative decoding.
            enable_prefix_caching: whether requests share the blocks of common prefixes.
            clock: returns the time of `Request.started`, in seconds.
        """
        self._limits = limits
        self._holdings = holdings
        self._recovery = recovery
        self._drafts = drafts
        self._enable_prefix_caching = enable_prefix_caching
        self._clock = clock

    def admit(self, step: PlannedStep, *, step_id: int, is_in_flight: bool) -> None:
        """Spends a step's remaining budget on waiting requests.

        Args:
            step: a step that has the next tokens of running requests.
            step_id: its id.
            is_in_flight: whether any step has no result yet.
        """
        holdings, cache, limits = self._holdings, self._holdings.cache, self._limits
        while (request := self._next(step, is_in_flight=is_in_flight)) is not None:
            num_tokens = len(request.token_ids)
            prefix, hindrance = self._find_prefix(request, step.budget)
            if hindrance is not None:
                request.times.enter(hindrance, self._clock())
                break
            row = holdings.start(request, prefix, self._reach(num_tokens))
            self._count(request, step_id)
            q_len = self._bound(request, step)
            added = cache.allocate(request, self._reach(request.num_computed_tokens + q_len))
            assert added is not None, "all of its blocks were free"
            step.assign_row(row, request, holdings.adapters.slot_of(request.adapter))
            if request.block_ids:
                step.add_blocks(row, 0, request.block_ids)
            if cache.states is not None:
                step.add_blocks(row, limits.token_table_width, request.state_block_ids)
            step.compute(request, row, q_len, num_tokens)
            if request.num_computed_tokens >= num_tokens:
                holdings.decode_plainly(request)
            cache.cache_full_blocks(request)

    def _next(self, step: PlannedStep, *, is_in_flight: bool) -> Request | None:
        """Returns the waiting request that is next, if any is and the step has room for it."""
        holdings, recovery = self._holdings, self._recovery
        max_running = min(self._limits.max_num_seqs, recovery.budget.tokens)
        has_room = step.budget and len(holdings.running) < max_running
        request = holdings.next_waiting() if has_room else holdings.waiting.peek()
        if request is None:
            return None
        if not has_room:
            hindrance = Stage.FULL_ROWS if step.budget else Stage.FULL_STEP
        elif request.num_pending_tokens:
            hindrance = Stage.QUEUED  # tokens of a preempted request must be known first
        elif request.awaits_mask:
            hindrance = Stage.GRAMMAR
        elif not recovery.may_join(request, is_in_flight=is_in_flight):
            hindrance = Stage.ALONE
        elif not holdings.adapters.has_room(request.adapter):
            hindrance = Stage.ADAPTER  # others that overtook it could keep its slot for ever
        else:
            return request
        request.times.enter(hindrance, self._clock())
        return None

    def _find_prefix(self, request: Request, budget: int) -> tuple[Prefix, Stage | None]:
        """Returns a request's cached tokens, and what hinders it to start, if anything does."""
        cache, tiers = self._holdings.cache, self._holdings.tiers
        num_tokens = self._reach(len(request.token_ids))
        if self._limits.computes_whole_prompts and len(request.token_ids) > budget:
            return NO_PREFIX, Stage.FULL_STEP
        # Cached tokens have no log-probabilities.
        prefix = NO_PREFIX if request.needs_prompt_logits else cache.match_prefix(request)
        if self._is_being_computed(request, prefix.num_tokens):
            return prefix, Stage.SAME_PREFIX
        if not cache.fits(prefix, num_tokens):
            return prefix, Stage.FULL_CACHE
        if tiers is not None and not request.needs_prompt_logits:
            is_whole, before = self._load(tiers, request, prefix), prefix.num_tokens
            prefix = cache.match_prefix(request)
            tiers.host.counts.hit_tokens += prefix.num_tokens - before
            if not is_whole:
                return prefix, Stage.LOADING
            if not cache.fits(prefix, num_tokens):
                return prefix, Stage.FULL_CACHE
        if not self._can_begin(request, prefix.num_tokens, budget):
            return prefix, Stage.IMAGE
        return prefix, None

    def _load(self, tiers: TieredKVCache, request: Request, prefix: Prefix) -> bool:
        """Loads what tiers below the GPU have of a longer prefix; returns whether that is all.

        Other requests may overwrite what was loaded before all is there. So a request loads no
        more blocks than its tokens have, and computes what is missing then.
        """
        absent = tiers.find_below(request, prefix)
        limits = self._limits
        most = len(request.block_keys) * limits.num_groups + limits.num_state_blocks
        if absent is None or request.num_loaded_blocks + absent.num_blocks > most:
            request.num_loaded_blocks = 0
            return True
        num_loaded = tiers.load(absent)
        request.num_loaded_blocks += num_loaded
        return num_loaded == absent.num_blocks

    def _bound(self, request: Request, step: PlannedStep) -> int:
        """Returns how many of a started request's tokens the step computes."""
        holdings, start = self._holdings, request.num_computed_tokens
        q_len = min(len(request.token_ids) - start, step.budget)
        q_len = step.bound_logprobs(request, q_len)
        if holdings.cache.states is not None:
            q_len = holdings.cache.states.cut(request, q_len)
        if not request.images:
            return q_len
        return holdings.images.bound(request, start, q_len, step.budget)

    def _can_begin(self, request: Request, num_prefix_tokens: int, budget: int) -> bool:
        """Whether no image comes next that is not encoded, or longer than the budget."""
        if not request.images:
            return True
        images = self._holdings.images
        if images.bound(request, num_prefix_tokens, min(budget, 1), budget):
            return True
        images.drop(request)
        return False

    def _is_being_computed(self, request: Request, num_prefix_tokens: int) -> bool:
        """Whether a running request is about to compute the block after this one's prefix.

        Waiting for it costs less than computing it twice; the outputs of one prompt share blocks
        this way. With states it waits for the snapshot at the end of a prompt like its own.
        """
        end = num_prefix_tokens + self._limits.block_size
        is_alone = not self._enable_prefix_caching or request.needs_prompt_logits
        if is_alone or end >= len(request.token_ids):
            return False
        if (states := self._holdings.cache.states) is not None:
            end = states.last_place(len(request.token_ids))
            if end <= num_prefix_tokens:
                return False
            return any(
                other.num_computed_tokens <= end == states.last_place(other.num_prompt_tokens)
                and _begin_alike(other, request, end)
                for other in self._holdings.running
            )
        return any(
            other.num_computed_tokens < end <= len(other.token_ids)
            and _begin_alike(other, request, end)
            for other in self._holdings.running
        )

    def _reach(self, end: int) -> int:
        """Returns how many tokens a request's blocks must hold to compute up to `end`."""
        return end if self._drafts is None else self._drafts.reach(end)

    def _count(self, request: Request, step_id: int) -> None:
        """Records a request's first run and how much of its prompt was cached."""
        now_s = self._clock()
        request.times.enter(Stage.PREFILL, now_s)
        if request.started is None:
            request.started = StepMark(step_id, now_s)
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            counts = self._holdings.counts
            counts.prompt_tokens += request.num_prompt_tokens
            counts.cached_tokens += request.num_cached_tokens


def _begin_alike(one: Request, other: Request, end: int) -> bool:
    """Whether the first `end` tokens of two requests mean the same, and may be shared."""
    return (
        one.cache_root == other.cache_root
        and one.token_ids[:end] == other.token_ids[:end]
        and _images_before(one, end) == _images_before(other, end)
    )


def _images_before(request: Request, end: int) -> list[tuple[int, bytes]]:
    """Returns offset and digest of the images that begin among the first `end` tokens."""
    return [(each.offset, each.image.digest) for each in request.images if each.offset < end]
