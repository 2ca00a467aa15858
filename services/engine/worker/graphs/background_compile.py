"""Traces and compiles a model and builds its kernels in a thread while a worker serves."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from services.engine.compilation.passes.unmatched import UnmatchedPassError
from services.engine.worker.graphs.turns import Turns

log = structlog.get_logger()

SWITCH_INTERVAL_S = 500e-6
"""Longest time the compiler holds Python's lock while a step waits for it."""


class BackgroundCompile:
    """A running compilation, whose result replaces the model between two steps."""

    def __init__(
        self,
        compile_model: Callable[[Turns], None],
        install: Callable[[], None],
        *,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Starts to compile.

        Args:
            compile_model: compiles without changing the model; leaves turns to captures.
            install: makes later steps run the result.
            agree: maps this rank's failure, or "", to the one that holds for all ranks.
        """
        self._install = install
        self._agree = agree
        self.turns = Turns()
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        self._result = thread.submit(compile_model, self.turns)
        thread.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Whether `install` can be called."""
        return self._result.done()

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
