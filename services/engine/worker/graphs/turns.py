"""Whose turn it is while a model is compiled: the compilation's, or a capture's."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WAY_S = 0.5
"""Longest time that a compilation gives way at once: it goes on, whatever steps miss."""
POLL_S = 1e-3


class Turns:
    """Lets either a compilation or a capture use torch.

    A capture changes how torch treats all threads: waits for the device are errors, and the random
    generator is captured. So graphs are captured only while the compilation waits for other
    processes or gives way.
    """

    def __init__(self) -> None:
        """Starts with neither at work."""
        self._works = threading.Lock()
        self._is_held_up = False
        self.is_wanted = False
        """Whether a capture has something to do."""

    @contextmanager
    def work(self) -> Iterator[None]:
        """Surrounds the compilation."""
        with self._works:
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Surrounds a wait in which the compilation uses neither Python nor the device."""
        self._works.release()
        try:
            yield
        finally:
            self._works.acquire()

    def give_way(self) -> None:
        """Lets captures do what they have to do now."""
        end_s = time.monotonic() + LONGEST_WAY_S
        with self.pause():
            while self.is_wanted and time.monotonic() < end_s:
                time.sleep(POLL_S)

    @property
    def compilation_waits(self) -> bool:
        """Whether the compilation waits for other processes, or gives way."""
        return not self._works.locked()

    def hold_up(self) -> bool:
        """Keeps a compilation that waits from going on until `let_go`; returns whether it waits."""
        self._is_held_up = self._works.acquire(blocking=False)
        return self._is_held_up

    def let_go(self) -> None:
        """Lets the compilation go on, if it was held up."""
        if self._is_held_up:
            self._is_held_up = False
            self._works.release()
