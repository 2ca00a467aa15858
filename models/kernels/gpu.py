"""Facts about a GPU that kernels and their tiles are chosen by."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache

import torch

HOPPER = (9, 0)
"""Compute capability of H100 and H200."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""CUDA builds of torch come with Triton, CPU builds do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device.

    capability: compute capability, major and minor.
    multiprocessors: programs beyond them wait for others to end, unless several fit on one.
    shared_bytes: shared memory that a program may have, in bytes.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def is_hopper(self) -> bool:
        """Whether kernels for Hopper's tensor cores and copy engine run."""
        return self.capability == HOPPER


def gpu_of(device: torch.device) -> Gpu:
    """Returns the facts about a CUDA device.

    It takes about as long as a launch: callers remember what they choose by them.
    """
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # stubs
    )


def is_hopper(device: torch.device) -> bool:
    """Returns whether kernels for Hopper's tensor cores and copy engine run on `device`."""
    return has_kernels(device) and gpu_of(device).is_hopper


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the multiprocessors of a CUDA device, for grids of programs that run at once."""
    return gpu_of(device).multiprocessors


def has_kernels(device: torch.device) -> bool:
    """Returns whether our kernels run on `device`."""
    return HAS_TRITON and device.type == "cuda"
