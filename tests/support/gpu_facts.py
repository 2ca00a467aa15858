"""Facts about GPUs that are not there."""

from types import SimpleNamespace

import torch

from models.kernels import gpu

HOPPER = (9, 0)


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


def use_gpu(monkeypatch, capability: tuple[int, int] = HOPPER, *, anywhere: bool = False) -> None:
    """Makes torch describe GPUs as `properties` does.

    anywhere: every device counts as a GPU, such as that of a CPU's tensors.
    """
    if anywhere:
        monkeypatch.setattr(gpu, "has_kernels", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(capability))
