"""Traces and compiles a model and builds its kernels in a thread while a worker serves."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import structlog

from services.engine.compilation.passes.unmatched import UnmatchedPassError

log = structlog.get_logger()

SWITCH_INTERVAL_S = 500e-6
"""Longest time the compiler holds Python's lock while a step waits for it."""


Pause = Callable[[], AbstractContextManager[None]]
"""Surrounds a wait in which a compilation uses neither Python nor the device."""


class BackgroundCompile:
    """A running compilation, whose result replaces the model between two steps.

    Graphs can be captured while it waits for other processes, and only then: a capture changes how
    torch treats all threads (waits for the device are errors, the random generator is captured).
    """

    def __init__(
        self,
        compile_model: Callable[[Pause], None],
        install: Callable[[], None],
        *,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Starts to compile.

        Args:
            compile_model: compiles without changing the model; takes what surrounds its waits.
            install: makes later steps run the result.
            agree: maps this rank's failure, or "", to the one that holds for all ranks.
        """
        self._install = install
        self._agree = agree
        self._works = threading.Lock()
        self._is_held_up = False
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        self._result = thread.submit(self._run, compile_model)
        thread.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Whether `install` can be called."""
        return self._result.done()

    @property
    def waits(self) -> bool:
        """Whether the compilation waits for other processes now."""
        return not self._works.locked()

    def hold_up(self) -> bool:
        """Keeps a compilation that waits from going on until `let_go`; returns whether it waits."""
        self._is_held_up = self._works.acquire(blocking=False)
        return self._is_held_up

    def let_go(self) -> None:
        """Lets a compilation go on, if it was held up."""
        if self._is_held_up:
            self._is_held_up = False
            self._works.release()

    def install(self) -> None:
        """Makes later steps run the compiled model, unless that failed on any rank.

        All ranks call it at the same place in their order of commands.

        Raises:
            UnmatchedPassError: a compiler pass matches nothing that the model promises.
        """
        sys.setswitchinterval(self._switch_interval_s)
        error = self._result.exception()
        if isinstance(error, UnmatchedPassError):
            raise error
        fault = self._agree("" if error is None else f"{type(error).__name__}: {error}")
        if fault:
            log.error("compilation_failed", error=fault, exc_info=error)
            return
        self._install()

    def _run(self, compile_model: Callable[[Pause], None]) -> None:
        with self._works:
            compile_model(self._pause)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._works.release()
        try:
            yield
        finally:
            self._works.acquire()
