"""Fills a model's parameters, from a checkpoint or with random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models.layers.decoder import CausalLM
from models.layers.weight import LoadsWeights
from models.loading.checkpoint import CheckpointError, iterate_tensors

DUMMY_SEED = 0
PROGRESS_INTERVAL = 50
"""Tensors between two reports of progress."""


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where one checkpoint tensor goes."""

    layer: LoadsWeights
    param: nn.Parameter
    shard_id: int


def load_checkpoint(model: CausalLM, folder: Path, on_progress: Callable[[str], None]) -> None:
    """Copies a checkpoint's tensors into the model, on its device and in its dtype.

    Args:
        model: built from the folder's config; changed in place.
        folder: the checkpoint.
        on_progress: called now and then with one line for the operator.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape or unreadable.
    """
    destinations = _destinations(model)
    missing = set(destinations)
    for tensor in iterate_tensors(folder):
        if _is_derived(tensor.name, model):
            continue
        destination = destinations.get(tensor.name)
        if destination is None:
            raise CheckpointError(f"{tensor.file}: the model has no tensor {tensor.name}")
        try:
            destination.layer.weight_loader(destination.param, tensor.values, destination.shard_id)
        except ValueError as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
        missing.discard(tensor.name)
        num_loaded = len(destinations) - len(missing)
        if num_loaded % PROGRESS_INTERVAL == 0 or not missing:
            on_progress(f"loaded {num_loaded} of {len(destinations)} tensors")
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}"
        )


def fill_with_random_weights(model: CausalLM) -> None:
    """Draws weights that keep activations finite, the same ones every time on one device."""
    for name, param in model.named_parameters():
        generator = torch.Generator(param.device).manual_seed(DUMMY_SEED)
        if param.dim() > 1:
            param.normal_(std=param.shape[-1] ** -0.5, generator=generator)
        else:
            param.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def _destinations(model: CausalLM) -> dict[str, _Destination]:
    """Returns where each tensor goes, by its name in the checkpoint."""
    destinations = {}
    for path, layer in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        checkpoint_names = model.packed_modules_mapping.get(own_name, (own_name,))
        for param_name, param in layer.named_parameters(recurse=False):
            assert isinstance(layer, LoadsWeights), f"{path} has parameters but no weight_loader"
            for shard_id, checkpoint_name in enumerate(checkpoint_names):
                name = ".".join(filter(None, (parent, checkpoint_name, param_name)))
                if not _is_derived(name, model):
                    destinations[name] = _Destination(layer, param, shard_id)
    return destinations


def _is_derived(name: str, model: CausalLM) -> bool:
    """Returns whether a stored tensor only repeats what the model has from elsewhere."""
    if name == "lm_head.weight":
        return model.config.tie_word_embeddings
    return name.endswith("rotary_emb.inv_freq")
