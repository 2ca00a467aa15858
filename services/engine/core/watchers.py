"""Watchers of the steps."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.core.redaction import redacted
from services.engine.core.snapshot import PendingSnapshot
from services.engine.errors import EngineUnavailableError, InvalidRequestError
from services.engine.prompt_image import EncoderImage
from services.engine.scheduler.scheduler import ScheduledStep

MAX_QUEUED_STEPS = 256
"""Most steps queued for one watcher; it misses further ones."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A step that ran, and the number of steps that the watcher missed before it.

    images: in prompts of rows, which the watcher of a recording has not had.
    """

    descriptor: BatchDescriptor
    result: StepResult
    num_missed: int
    images: Sequence[EncoderImage] = ()


class StepWatcher:
    """An asynchronous iterator over steps; a slow reader misses some, the loop never waits."""

    def __init__(self, *, include_token_ids: bool) -> None:
        self.include_token_ids = include_token_ids
        self._snapshot: Snapshot | None = None
        self._steps: deque[WatchedStep] = deque()
        self._num_missed = 0
        self._images: dict[bytes, EncoderImage] = {}
        self._shown_images: set[bytes] = set()
        self._is_closed = False
        self._changed = asyncio.Event()

    async def snapshot(self) -> Snapshot | None:
        """Returns the state before the first step once it is known; None if the engine stops first.

        Only for watchers added with a snapshot.
        """
        while self._snapshot is None and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return self._snapshot

    def begin(self, snapshot: Snapshot, images: Iterable[EncoderImage]) -> None:
        """Takes the state before the first step, and the images of its rows."""
        self._snapshot = snapshot
        self.add_images(images)
        self._changed.set()

    def add_images(self, images: Iterable[EncoderImage]) -> None:
        """Takes images, of which the next step shows new ones."""
        for each in images:
            if each.digest not in self._shown_images:
                self._images[each.digest] = each

    def put(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Takes one step, or counts it as missed."""
        if len(self._steps) >= MAX_QUEUED_STEPS:
            self._num_missed += 1
            return
        images = tuple(self._images.values())
        self._steps.append(WatchedStep(descriptor, result, self._num_missed, images))
        self._num_missed = 0
        self._shown_images |= self._images.keys()
        self._images.clear()
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration after the queued steps."""
        self._is_closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[WatchedStep]:
        """Yields the steps in order until the engine stops."""
        while True:
            while self._steps:
                yield self._steps.popleft()
            if self._is_closed:
                return
            self._changed.clear()
            await self._changed.wait()


class StepWatchers:
    """All watchers of one engine."""

    def __init__(self) -> None:
        self._watchers: set[StepWatcher] = set()
        self._pending: dict[StepWatcher, PendingSnapshot] = {}
        self._with_snapshot: set[StepWatcher] = set()

    @property
    def are_any(self) -> bool:
        """Whether someone watches."""
        return bool(self._watchers or self._pending)

    def open(
        self,
        take_snapshot: Callable[[], PendingSnapshot] | None,
        *,
        num_ranks: int,
        include_token_ids: bool,
        include_snapshot: bool,
    ) -> StepWatcher:
        """Returns a watcher of the steps from now on; end it with `remove`.

        Args:
            take_snapshot: returns the state before the next step; None without a worker.
            num_ranks: data-parallel ranks.
            include_token_ids: whether it sees tokens.
            include_snapshot: whether it begins with a snapshot.

        Raises:
            EngineUnavailableError: there is no worker to take a snapshot of.
            InvalidRequestError: several ranks have rows, and a snapshot has those of one.
        """
        snapshot = None
        if include_snapshot:
            if num_ranks > 1:
                raise InvalidRequestError("a snapshot needs an engine of one data-parallel rank")
            if take_snapshot is None:
                raise EngineUnavailableError("the engine is not ready: its worker is starting")
            snapshot = take_snapshot()
        return self.add(include_token_ids=include_token_ids, snapshot=snapshot)

    def add(
        self, *, include_token_ids: bool, snapshot: PendingSnapshot | None = None
    ) -> StepWatcher:
        """Returns a watcher of all steps from now on.

        With a snapshot: of the steps scheduled from now on, until this worker is lost.
        """
        watcher = StepWatcher(include_token_ids=include_token_ids)
        if snapshot is None:
            self._watchers.add(watcher)
            return watcher
        self._with_snapshot.add(watcher)
        self._pending[watcher] = snapshot
        self._begin_settled()
        return watcher

    def remove(self, watcher: StepWatcher) -> None:
        """Removes a watcher."""
        self._watchers.discard(watcher)
        self._with_snapshot.discard(watcher)
        self._pending.pop(watcher, None)

    def publish(self, step: ScheduledStep, result: StepResult) -> None:
        """Passes a step to every watcher."""
        if self._watchers:
            if any(each.images for each in step.descriptor.row_assignments):
                self._show_images(step)
            self._show(step.descriptor, result)
        if self._pending:
            for snapshot in self._pending.values():
                snapshot.take(step, result)
            self._begin_settled()

    def close(self) -> None:
        """Ends every watcher."""
        self.close_with_snapshot()
        for watcher in self._watchers:
            watcher.close()

    def close_with_snapshot(self) -> None:
        """Ends the watchers that began with a snapshot, whose rows are lost."""
        for watcher in list(self._with_snapshot):
            watcher.close()
            self.remove(watcher)

    def _show_images(self, step: ScheduledStep) -> None:
        requests = (*step.requests, *step.unsampled)
        images = [each.image for request in requests for each in request.images]
        for watcher in self._watchers & self._with_snapshot:
            if watcher.include_token_ids:
                watcher.add_images(images)

    def _show(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        without_tokens = None
        for watcher in self._watchers:
            if watcher.include_token_ids:
                watcher.put(descriptor, result)
            else:
                without_tokens = without_tokens or redacted(descriptor, result)
                watcher.put(*without_tokens)

    def _begin_settled(self) -> None:
        settled = [w for w, snapshot in self._pending.items() if snapshot.is_settled]
        for watcher in settled:
            snapshot = self._pending.pop(watcher)
            images = snapshot.images if watcher.include_token_ids else ()
            watcher.begin(snapshot.message(), images)
            self._watchers.add(watcher)
