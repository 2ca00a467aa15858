"""How long an event loop keeps what is due waiting."""

import asyncio
import time
from typing import NoReturn

from services.telemetry.histogram import Histogram

TICK_S = 0.02
"""Time between two looks: the longest wait that may go unseen, and 0.1 % of a core."""
BOUNDS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0),
)


class LoopLag:
    """Watches the event loop that it runs in.

    A wait without the CPU time of a wait is another thread's or the machine's doing.
    """

    def __init__(self) -> None:
        self.waits = Histogram(BOUNDS_S)
        """Seconds by which each tick came too late."""
        self.cpu = Histogram(BOUNDS_S)
        """Seconds of CPU that the event loop's thread took from one tick to the next."""

    async def watch(self) -> NoReturn:
        """Looks until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s, cpu_s = loop.time() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.waits.observe(max(0.0, loop.time() - due_s))
            self.cpu.observe(time.thread_time() - cpu_s)
