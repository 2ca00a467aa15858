"""Kernels' launchers without a GPU: Triton builds for one, and launches are noted."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.support.gpu_facts import CARDS


class _AbsentDriver:
    """Stands for a GPU that is not there."""

    def __init__(self, launched: list[str], card: str) -> None:
        facts = CARDS[card]
        major, minor = facts.capability
        self._launched = launched
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": facts.shared_bytes},
            load_binary=lambda name, binary, shared, device: (binary, binary, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def launcher_cls(self, source, metadata):
        """Returns what notes the launches of a kernel."""
        return partial(self._note, source.fn.__name__)

    def _note(self, name, *arguments) -> None:
        self._launched.append(name)


@contextmanager
def absent_gpu(card: str = "H200") -> Iterator[list[str]]:
    """Has Triton build for a card of `CARDS`, for the length of the block.

    Yields names of launches.
    """
    launched: list[str] = []
    before = driver._active
    driver.set_active(_AbsentDriver(launched, card))
    try:
        yield launched
    finally:
        driver._active = before
