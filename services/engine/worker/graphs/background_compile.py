"""Builds kernels and compiles a model while a worker serves, in a thread beside its steps."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from services.engine.compilation.compile_model import CompiledModel

log = structlog.get_logger()

SWITCH_INTERVAL_S = 500e-6
"""Longest time for which the compiler keeps Python from a step that wants it, meanwhile."""


class BackgroundCompile:
    """A compilation under way, whose result takes the model's place between two steps."""

    def __init__(
        self,
        compile_model: Callable[[], "CompiledModel | None"],
        install: Callable[["CompiledModel | None"], None],
    ) -> None:
        """Starts to compile.

        Args:
            compile_model: does it; it must leave the model as it is. Returns None if there was
                nothing to compile but kernels.
            install: has later steps run the result; None if there is none, or an error.
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
        """Has later steps run what was compiled."""
        sys.setswitchinterval(self._switch_interval_s)
        error = self._result.exception()
        if error is not None:
            log.error("compilation_failed", exc_info=error)
            self._install(None)
            return
        self._install(self._result.result())
