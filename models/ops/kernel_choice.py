"""Decides whether an operation runs as one of our kernels or as its PyTorch reference."""

import importlib.util

import torch

HOPPER = (9, 0)
"""Compute capability of H100 and H200."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""CUDA builds of torch come with Triton, CPU builds do not."""


def has_kernels(device: torch.device) -> bool:
    """Returns whether our kernels run on `device`."""
    return HAS_TRITON and device.type == "cuda"


def runs_as_kernel(x: torch.Tensor) -> bool:
    """Returns whether an operation that a compiler could fuse runs as our kernel on x.

    Under a compiler the reference runs, as the compiler fuses plain PyTorch with its neighbours.
    """
    return HAS_TRITON and x.is_cuda and x.is_contiguous() and not torch.compiler.is_compiling()
