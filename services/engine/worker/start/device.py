"""Chooses a worker's device and dtypes."""

import structlog
import torch

from models.config import ModelConfig
from models.kernels.gpu import FP8_CAPABILITY, gpu_of
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.stored_formats import needs_bfloat16
from services.engine.config.cache import CacheConfig
from services.engine.config.checkpoint import CheckpointConfig
from services.engine.config.worker import WorkerConfig

log = structlog.get_logger()

_REASON = "weights stay packed in bfloat16 only"


def choose_device(config: WorkerConfig, number: int) -> torch.device:
    """Returns the GPU of this number, or the CPU.

    Raises:
        ValueError: CUDA is configured and missing, or the machine has fewer GPUs.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError("device is cuda, but this machine has no CUDA device that torch can use")
    num_devices = torch.cuda.device_count()
    if number >= num_devices:
        raise ValueError(f"GPU {number} is wanted; this machine has {num_devices}, from 0 on")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def choose_dtype(
    config: CheckpointConfig, model_config: ModelConfig, device: torch.device
) -> torch.dtype:
    """Returns the dtype of weights and activations.

    By default float16 checkpoints are computed in bfloat16 where their weights stay packed then.
    """
    name: str = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "both configurations know names of dtypes only"
    quantization = model_config.quantization
    if quantization is None or not needs_bfloat16(device, dtype, quantization):
        return dtype
    if config.dtype == "auto" and dtype == torch.float16:
        log.info("dtype_changed", stored=name, used="bfloat16", reason=_REASON)
        return torch.bfloat16
    log.warning("weights_dequantised", dtype=name, reason=_REASON)
    return dtype


def choose_cache_dtype(
    config: CacheConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Returns the dtype of cached keys and values for a model in `dtype`.

    Raises:
        ValueError: 8-bit floats are configured, and the device does not support them.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and gpu_of(device).capability < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, which takes a GPU of compute capability "
            f"8.9; {torch.cuda.get_device_name(device)} has less. Use auto"
        )
    return FP8_CACHE_DTYPE


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name in configurations."""
    return str(dtype).removeprefix("torch.")
