"""Facts about GPUs that are not there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from models.kernels import gpu
from models.kernels.gpu import Gpu

HOPPER = (9, 0)
CARDS = {
    "H200": Gpu(capability=HOPPER, multiprocessors=132, shared_bytes=227 * 1024),
    "A100": Gpu(capability=(8, 0), multiprocessors=108, shared_bytes=163 * 1024),
    "A10": Gpu(capability=(8, 6), multiprocessors=72, shared_bytes=99 * 1024),
    "L40S": Gpu(capability=(8, 9), multiprocessors=142, shared_bytes=99 * 1024),
    "B200": Gpu(capability=(10, 0), multiprocessors=148, shared_bytes=227 * 1024),
    "RTX5090": Gpu(capability=(12, 0), multiprocessors=170, shared_bytes=99 * 1024),
}
"""Cards by name.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""


def properties(
    capability: tuple[int, int] = HOPPER,
    *,
    multiprocessors: int = 132,
    shared_bytes: int = 232448,
) -> SimpleNamespace:
    """Returns what torch.cuda.get_device_properties says; by default of an H100 SXM or an H200."""
    major, minor = capability
    return SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=shared_bytes,
    )


def properties_of(card: str) -> SimpleNamespace:
    """Returns what torch says of a card of `CARDS`."""
    facts = CARDS[card]
    return properties(
        facts.capability,
        multiprocessors=facts.multiprocessors,
        shared_bytes=facts.shared_bytes,
    )


class _ChosenFor:
    """The GPU that tiles and kernels are chosen for; another one has them chosen again."""

    capability: tuple[int, int] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        forget_choices()


_CHOSEN_FOR = _ChosenFor()


def use_gpu(monkeypatch, capability: tuple[int, int] = HOPPER, *, anywhere: bool = False) -> None:
    """Makes torch describe GPUs as `properties` does.

    Nothing is left of what was chosen before, for other GPUs or for none, nor later of what is
    chosen now.

    anywhere: every device counts as a GPU, such as that of a CPU's tensors.
    """
    # It is put back last.
    monkeypatch.setattr(_CHOSEN_FOR, "capability", capability)
    if anywhere:
        monkeypatch.setattr(gpu, "has_kernels", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(capability))


@contextmanager
def generic_tables() -> Iterator[None]:
    """Has GPUs count as ones that no table was measured on, for the length of the block."""
    gpu.use_generic_tables(is_on=True)
    forget_choices()
    try:
        yield
    finally:
        gpu.use_generic_tables(is_on=False)
        forget_choices()


def forget_choices() -> None:
    """Has tiles and kernels chosen again, which the process remembers by device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("models.kernels."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
