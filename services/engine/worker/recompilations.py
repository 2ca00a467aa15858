"""Names of kernels and models that are compiled while serving.

A kernel that Triton builds at its first launch, or a model that Dynamo traces again, delays the
step that needs it and so every stream.
"""

import sys
from importlib import import_module
from typing import Any

from models.kernels.gpu import HAS_TRITON


class Recompilations:
    """Collects the names of compiled code once it is armed."""

    def __init__(self) -> None:
        self.is_armed = False
        self._names: list[str] = []

    def load(self) -> None:
        """Imports what `arm` needs, so that a failed import ends the start and not the serving."""
        if HAS_TRITON:
            import_module("models.kernels.launching.build_hook")

    def arm(self) -> None:
        """Collects the names of code that is compiled from now on."""
        self.is_armed = True
        if "torch._dynamo" in sys.modules:
            # Importing it takes seconds, and a model that was not traced is not traced again.
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._take_trace)
        if HAS_TRITON:
            # Triton is imported on first use: a CPU installation has none.
            from models.kernels.launching.build_hook import on_build

            on_build(self._names.append)

    def drain(self) -> list[str]:
        """Returns the names collected since the last call."""
        names = self._names.copy()
        self._names.clear()
        return names

    def _take_trace(self, trace: Any) -> None:
        self._names.append("a traced model")
