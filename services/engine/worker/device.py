"""Where a worker's model runs, and in which dtype."""

import torch

from models.config import ModelConfig
from services.engine.config import EngineConfig


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """Returns the device of a rank.

    Raises:
        ValueError: the configuration wants CUDA and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError("device is cuda, but this machine has no CUDA device that torch can use")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def choose_dtype(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> torch.dtype:
    """Returns the dtype of weights, activations and cache."""
    name: str = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "both configurations know names of dtypes only"
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as configurations write it."""
    return str(dtype).removeprefix("torch.")
