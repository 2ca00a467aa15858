"""Kernels' launchers without a GPU: Triton builds for one, and launches are noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

HOPPER = GPUTarget("cuda", 90, 32)
_PROPERTIES = {"max_shared_mem": 232448}


class _AbsentDriver:
    """Stands for a GPU that is not there."""

    def __init__(self, launched: list[str]) -> None:
        self._launched = launched
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: _PROPERTIES,
            load_binary=lambda name, binary, shared, device: (binary, binary, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def launcher_cls(self, source, metadata):
        """Returns what notes the launches of a kernel."""
        return partial(self._note, source.fn.__name__)

    def _note(self, name, *arguments) -> None:
        self._launched.append(name)


@contextmanager
def absent_gpu() -> Iterator[list[str]]:
    """Has Triton build for a Hopper GPU, for the length of the block; yields names of launches."""
    launched: list[str] = []
    before = driver._active
    driver.set_active(_AbsentDriver(launched))
    try:
        yield launched
    finally:
        driver._active = before
