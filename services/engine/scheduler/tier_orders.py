"""The tiers below the GPU, as a scheduler sees them: copies to order, and news of the disk."""

from collections.abc import Iterable, Sequence

from services.engine.batch import BatchDescriptor, BlockCopies, StepResult, pack_int32
from services.engine.kv_cache.host_tier import DiskNews, TierCopies
from services.engine.request import Request
from services.engine.request_times import Stage
from services.engine.scheduler.block_pairs import pack_pairs
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.parked_requests import UNMEASURED_LIMIT_S
from services.engine.scheduler.planned_step import ScheduledStep


class TierOrders:
    """The tiers of one scheduler; all calls do nothing where there are none."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._tiers = holdings.tiers

    @property
    def num_host_blocks(self) -> int:
        """Blocks that the host's memory holds."""
        return 0 if self._tiers is None else len(self._tiers.host)

    @property
    def num_disk_blocks(self) -> int:
        """Blocks on disk."""
        return 0 if self._tiers is None else len(self._tiers.disk or ())

    @property
    def wake_s(self) -> float | None:
        """Seconds until a request stops to wait for the disk; None if none does."""
        until_s = self._holdings.parked.until_s
        return None if until_s is None else max(0.0, until_s - self._holdings.now_s())

    @property
    def has_copies(self) -> bool:
        """Whether the step being planned has copies, even without a request."""
        return self._tiers is not None and self._tiers.host.has_copies

    def enqueue(self, request: Request) -> None:
        """Adds a new request, which first waits for the disk if that has more of its prefix."""
        self._holdings.rank(request)
        if not self._park(request):
            self._holdings.waiting.push(request)

    def begin_step(self) -> None:
        """Stores full blocks for the disk; requests that have waited long enough go on."""
        if self._tiers is not None:
            self._tiers.begin_step()
            self._queue(self._holdings.parked.take_late(self._holdings.now_s()))

    def order(self, descriptor: BatchDescriptor) -> None:
        """Adds the copies of a step that is sent now."""
        tiers = self._tiers
        copies = None if tiers is None else tiers.take_tier_copies(descriptor.step_id)
        if tiers is not None and copies is not None:
            message = pack_block_copies(copies, names_stored=tiers.disk is not None)
            descriptor.block_copies.CopyFrom(message)

    def observe(self, step: ScheduledStep, result: StepResult) -> None:
        """Takes the times that a step shows: of copies, and of prompts."""
        if self._tiers is None:
            return
        host, context = self._tiers.host, step.descriptor.context
        host.settle(step.step_id)
        host.counts.copy_s += result.block_copy_us / 1e6
        if context.is_prefill:
            host.rule.observe_prompts(context.num_tokens, result.elapsed_us)

    def retreat(self) -> None:
        """Forgets the copies of steps in flight, which did not run."""
        if self._tiers is not None:
            self._end_reads(self._tiers.undo_tier_copies())

    def take_disk_news(self, news: DiskNews) -> None:
        """Takes what a worker has written to disk and read from it."""
        tiers = self._tiers
        if tiers is None or tiers.disk is None:
            return
        counts = tiers.host.counts
        counts.num_written += len(news.added)
        counts.read_s += news.read_us / 1e6
        counts.num_faults += news.num_faults
        counts.num_drops += news.num_drops
        tiers.change_disk(added=news.added, removed=news.removed)
        if news.arrived:
            tiers.host.rule.observe_reads(len(news.arrived), news.read_us)
        for entry in news.arrived:
            tiers.host.end_read(entry, has_arrived=True)
        for entry in news.failed:
            tiers.host.end_read(entry, has_arrived=False)
        self._end_reads((*news.arrived, *news.failed))

    def _end_reads(self, entries: Sequence[bytes]) -> None:
        self._queue(self._holdings.parked.end_reads(entries))

    def _queue(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.times.enter(Stage.QUEUED, self._holdings.now_s())
            self._holdings.waiting.push(request)

    def _park(self, request: Request) -> bool:
        """Has a request wait for blocks that only the disk has; returns whether it does."""
        tiers, parked = self._tiers, self._holdings.parked
        if tiers is None or request.is_suspect or request.needs_prompt_logits:
            return False
        entries, num_tokens = tiers.read_ahead(request)
        if not entries:
            return False
        tiers.host.counts.disk_hit_tokens += num_tokens
        compute_s = tiers.host.rule.compute_s(num_tokens)
        limit_s = UNMEASURED_LIMIT_S if compute_s is None else compute_s
        now_s = self._holdings.now_s()
        request.times.enter(Stage.LOADING, now_s)
        parked.park(request, entries, until_s=now_s + limit_s)
        return True


def pack_block_copies(copies: TierCopies, *, names_stored: bool = False) -> BlockCopies:
    """Packs the copies of a step; names_stored: whether a disk keeps what is stored."""
    stored_from, stored_to = pack_pairs(copies.stored)
    loaded_from, loaded_to = pack_pairs(copies.loaded)
    return BlockCopies(
        stored_from=stored_from,
        stored_to=stored_to,
        loaded_from=loaded_from,
        loaded_to=loaded_to,
        stored_entries=b"".join(copies.entries) if names_stored else b"",
        read_entries=b"".join(entry for entry, _ in copies.reads),
        read_to=pack_int32([slot for _, slot in copies.reads]),
    )
