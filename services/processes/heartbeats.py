"""Signs of life of several processes, in memory that they share with their parent."""

import asyncio
import mmap
from collections.abc import Collection
from typing import NoReturn

BEAT_INTERVAL_S = 1.0
"""Time between two signs of a process, and between two looks of the parent."""
SILENT_LOOKS = 3
"""Looks without a sign after which a process does not count as serving."""
HUNG_LOOKS = 15
"""Looks without a sign after which a process hangs."""
START_LOOKS = 120
"""Looks after which a process hangs that has given no sign since its start."""

DIED, HUNG = "died", "hung"
"""Why a process was lost."""

_WORD_BYTES = 8


class Heartbeats:
    """Made by the parent before it forks. A process beats; the parent looks.

    Looks are counted, not seconds: where the parent is stopped as well, as by a machine that
    pauses, no process becomes silent.
    """

    def __init__(self, num_processes: int) -> None:
        """Makes the memory; no process has begun."""
        reasons = (DIED, HUNG)
        num_words = 3 * num_processes + len(reasons)
        words = memoryview(mmap.mmap(-1, num_words * _WORD_BYTES)).cast("Q")
        self.num_processes = num_processes
        self._beats = words[:num_processes]
        self._seen = words[num_processes : 2 * num_processes]
        self._silent = words[2 * num_processes : 3 * num_processes]
        self._lost = {reason: words[-1 - at :] for at, reason in enumerate(reasons)}

    async def keep(self, process: int) -> NoReturn:
        """Beats for a process, from its event loop, until cancelled."""
        while True:
            self.beat(process)
            await asyncio.sleep(BEAT_INTERVAL_S)

    def beat(self, process: int) -> None:
        """Gives a sign of a process's life."""
        self._beats[process] += 1

    def begin(self, process: int) -> None:
        """Notes that a process is being started."""
        self._beats[process] = self._seen[process] = self._silent[process] = 0

    def look(self, processes: Collection[int]) -> int | None:
        """Looks for signs since the last look, and returns a process that hangs, if one does.

        Others may wait for a lock that it holds, so they get their time again.

        Args:
            processes: the running ones.
        """
        for process in processes:
            is_silent = self._beats[process] == self._seen[process]
            self._silent[process] = self._silent[process] + 1 if is_silent else 0
            self._seen[process] = self._beats[process]
        hung = max(filter(self._hangs, processes), key=self._silent.__getitem__, default=None)
        if hung is not None:
            for process in processes:
                self._silent[process] = 0
        return hung

    def note_loss(self, reason: str) -> None:
        """Counts a lost process, which is not serving any more."""
        self._lost[reason][0] += 1

    @property
    def num_lost(self) -> dict[str, int]:
        """Processes lost so far, by reason."""
        return {reason: count[0] for reason, count in self._lost.items()}

    @property
    def num_serving(self) -> int:
        """Processes that have given a sign lately."""
        states = zip(self._beats, self._silent, strict=True)
        return sum(beats > 0 and silent < SILENT_LOOKS for beats, silent in states)

    def _hangs(self, process: int) -> bool:
        limit = HUNG_LOOKS if self._beats[process] else START_LOOKS
        return self._silent[process] >= limit
