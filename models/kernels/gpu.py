"""Facts about a GPU that kernels and their tiles are chosen by."""

import importlib.util
from dataclasses import dataclass
from functools import lru_cache

import torch

HOPPER = (9, 0)
"""Compute capability of H100 and H200."""
FP8_CAPABILITY = (8, 9)
"""First compute capability that converts 8-bit floats."""
LEAST_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on the cards that have least: of 8.6, 8.9 and 12.0.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""CUDA builds of torch come with Triton, CPU builds do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device.

    capability: compute capability, major and minor.
    multiprocessors: programs beyond them wait for others to end, unless several fit on one.
    shared_bytes: shared memory that a program may have, in bytes.
    is_generic: whether it counts as a GPU that no table was measured on.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    is_generic: bool = False

    @property
    def is_hopper(self) -> bool:
        """Whether kernels for Hopper's tensor cores and copy engine run."""
        return self.capability == HOPPER and not self.is_generic

    @property
    def reads_left_factors(self) -> bool:
        """Whether tensor cores may read left factors from shared memory, not from registers."""
        return self.capability[0] in (9, 10)

    def fits(self, shared_bytes: int) -> bool:
        """Returns whether a program gets as much shared memory; tiles for Hopper all do."""
        return self.is_hopper or shared_bytes <= self.shared_bytes

    def stages(self, most: int, tile_bytes: int, other_bytes: int = 0) -> int:
        """Returns the stages of a pipeline, at most `most`, that fit into shared memory.

        Hopper has what its tables say.

        tile_bytes: what a stage keeps.
        other_bytes: of the program beside the stages.
        """
        if self.is_hopper:
            return most
        return max(1, min(most, (self.shared_bytes - other_bytes) // tile_bytes))


_state = {"is_generic": False}


def use_generic_tables(*, is_on: bool) -> None:
    """Makes every GPU of the process count as one that no table was measured on, or no longer.

    Call it before anything is chosen: callers of gpu_of remember what they chose. Such a GPU has
    as little shared memory as any, and none of the kernels for Hopper.
    """
    _state["is_generic"] = is_on


def gpu_of(device: torch.device) -> Gpu:
    """Returns the facts about a CUDA device.

    It takes about as long as a launch: callers remember what they choose by them.
    """
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # stubs
    is_generic = _state["is_generic"]
    return Gpu(
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=min(shared_bytes, LEAST_SHARED_BYTES) if is_generic else shared_bytes,
        is_generic=is_generic,
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
