"""Loads the weights of a running model again, into the same memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from models.layers.decoder import CausalLM
from models.loading.checkpoint import open_checkpoint
from models.loading.loader import tensor_defaults
from models.loading.packed_weights import find_packed
from models.loading.plan import Load, plan_loads
from models.loading.stored_tensors import by_model_name
from models.loading.weights import load_weights


def plan_reload(
    model: CausalLM, folder: Path, *, device: torch.device, dtype: torch.dtype
) -> list[Load]:
    """Returns the loads that fill a loaded model's parameters as `load_model` did.

    Parameters that no load fills, such as the head that scores texts, and all buffers keep their
    values only if the caller does. Files stay open as long as the loads exist.

    Args:
        model: of `load_model`, on `device`.
        folder: the checkpoint that it came from.
        device: of the model.
        dtype: of its activations.

    Raises:
        CheckpointError: the checkpoint does not fit the model any more.
    """
    pooling, model.pooling = model.pooling, None  # it has files of its own
    try:
        with tensor_defaults(device, dtype), torch.no_grad():
            stored = by_model_name(open_checkpoint(folder), model)
            packed = find_packed(stored, model.config.quantization, dtype)
            loads = plan_loads(stored, packed, model, dtype)
    finally:
        model.pooling = pooling
    return [own for load in loads for own in load.of_this_rank()]


def reload_weights(
    loads: Sequence[Load], *, device: torch.device, dtype: torch.dtype, is_shared: bool
) -> None:
    """Fills the parameters of a plan; arguments are those of `load_weights` and `plan_reload`."""
    with tensor_defaults(device, dtype), torch.no_grad():
        load_weights(loads, device, lambda line: None, is_shared=is_shared)
