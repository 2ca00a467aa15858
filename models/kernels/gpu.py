"""Decides whether operators run as our kernels or as their PyTorch references."""

import importlib.util

import torch

HOPPER = (9, 0)
"""Compute capability of H100 and H200."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""CUDA builds of torch come with Triton, CPU builds do not."""


def has_kernels(device: torch.device) -> bool:
    """Returns whether our kernels run on `device`."""
    return HAS_TRITON and device.type == "cuda"
