"""Taps on the step loop: who wants to see every step as it runs."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.engine.batch import BatchDescriptor, StepResult, redacted

MAX_QUEUED_STEPS = 256
"""Steps that one watcher may lag behind before it misses some."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """One step that ran, and how many before it the watcher missed."""

    descriptor: BatchDescriptor
    result: StepResult
    num_missed: int


class StepWatcher:
    """One tap; iterate over it to get the steps. It never slows the loop, it misses steps."""

    def __init__(self, *, include_token_ids: bool) -> None:
        self.include_token_ids = include_token_ids
        self._steps: deque[WatchedStep] = deque()
        self._num_missed = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Takes one step, or counts it as missed."""
        if len(self._steps) >= MAX_QUEUED_STEPS:
            self._num_missed += 1
            return
        self._steps.append(WatchedStep(descriptor, result, self._num_missed))
        self._num_missed = 0
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration once what is queued has been taken."""
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
    """All taps of one engine."""

    def __init__(self) -> None:
        self._watchers: set[StepWatcher] = set()

    def add(self, *, include_token_ids: bool) -> StepWatcher:
        """Returns a new tap that sees every step from now on."""
        watcher = StepWatcher(include_token_ids=include_token_ids)
        self._watchers.add(watcher)
        return watcher

    def remove(self, watcher: StepWatcher) -> None:
        """Takes a tap away."""
        self._watchers.discard(watcher)

    def publish(self, descriptor: BatchDescriptor, result: StepResult) -> None:
        """Shows one step to every tap; free of charge while there is none."""
        if not self._watchers:
            return
        without_tokens = None
        for watcher in self._watchers:
            if watcher.include_token_ids:
                watcher.put(descriptor, result)
            else:
                without_tokens = without_tokens or redacted(descriptor, result)
                watcher.put(*without_tokens)

    def close(self) -> None:
        """Ends every tap."""
        for watcher in self._watchers:
            watcher.close()
