"""Traces and compiles a model and builds its kernels in a thread while a worker serves."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from services.engine.compilation.passes.unmatched import UnmatchedPassError

log = structlog.get_logger()

SWITCH_INTERVAL_S = 500e-6
"""Longest time the compiler holds Python's lock while a step waits for it."""


class BackgroundCompile:
    """A running compilation, whose result replaces the model between two steps."""

    def __init__(
        self,
        compile_model: Callable[[], None],
        install: Callable[[], None],
    ) -> None:
        """Starts to compile.

        Args:
            compile_model: compiles without changing the model.
            install: makes later steps run the result.
        """
        self._install = install
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        self._result = thread.submit(compile_model)
        thread.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """Whether `install` can be called."""
        return self._result.done()

    def install(self) -> None:
        """Makes later steps run the compiled model, unless that failed.

        Raises:
            UnmatchedPassError: a compiler pass matches nothing that the model promises.
        """
        sys.setswitchinterval(self._switch_interval_s)
        error = self._result.exception()
        if isinstance(error, UnmatchedPassError):
            raise error
        if error is not None:
            log.error("compilation_failed", exc_info=error)
            return
        self._install()
