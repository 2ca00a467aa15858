"""Copies between host and device that do not wait."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns the array as a tensor on the device; on a CPU the two share memory.

    On CUDA the copy goes through pinned memory and is ordered on the current stream. PyTorch keeps
    the pinned memory until the copy is done, so the caller may drop the array at once.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor).to(device, non_blocking=True)


def overwrite(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Writes an array over a tensor of its shape; as in `to_device`, it may be dropped at once."""
    if target.device.type == "cpu":
        target.numpy()[...] = array
        return
    host = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
    host.numpy()[...] = array
    target.copy_(host, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, valid once the current stream has made it."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
