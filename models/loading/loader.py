"""From a checkpoint folder to a model that is ready to run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from models.config import ModelConfig
from models.layers.decoder import CausalLM
from models.loading.weights import fill_with_random_weights, load_checkpoint
from models.parallel.group import SINGLE, ParallelGroup
from models.registry import model_class


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    group: ParallelGroup = SINGLE,
    on_progress: Callable[[str], None] | None = None,
) -> CausalLM:
    """Builds the model that `folder`/config.json describes and gives it its weights.

    Args:
        folder: the checkpoint, in Hugging Face form.
        device: where parameters are made; weights go there directly.
        dtype: of parameters and activations.
        load_format: "safetensors", or "dummy" for seeded random weights.
        group: the ranks that share the model; this rank loads its own shards.
        on_progress: called now and then with one line for the operator.

    Returns:
        The model in eval mode; no parameter requires a gradient.

    Raises:
        ConfigError: config.json is missing, wrong, or names an unsupported model.
        CheckpointError: the weights are missing, damaged, or do not fit.
        ValueError: unknown load_format, or the group cannot share the model.
    """
    config = ModelConfig.from_folder(folder)
    build = model_class(config.architecture)
    with _tensor_defaults(device, dtype), torch.no_grad():
        model = build(config, group)
        if load_format == "dummy":
            fill_with_random_weights(model)
        elif load_format == "safetensors":
            load_checkpoint(model, folder, on_progress or _ignore_progress)
        else:
            raise ValueError(f"load_format is {load_format!r}; it must be safetensors or dummy")
    return model.eval()


@contextmanager
def _tensor_defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Makes new tensors lie on `device` and have `dtype`, for the length of the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)


def _ignore_progress(line: str) -> None:
    """Takes a line of progress and does nothing."""
