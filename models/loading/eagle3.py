"""Loads an EAGLE-3 head beside its model."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import cast

import torch
from torch import nn

from models.config import ConfigError
from models.eagle3 import Eagle3Head
from models.eagle3_config import Eagle3Config
from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError, CheckpointTensor, open_checkpoint
from models.loading.dummy import fill_with_random_weights
from models.loading.loader import tensor_defaults
from models.loading.names import find_destinations

_DERIVED = frozenset({"t2d"})
"""Stored beside d2t, which says the same."""


def load_eagle3(
    folder: Path,
    model: CausalLM,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    max_positions: int = 0,
) -> Eagle3Head:
    """Builds the head in a folder; a head without an embedding has the model's.

    Args:
        folder: config.json and weights.
        model: whose tokens it guesses; its forward pass returns the layers that the head reads.
        device: of the parameters.
        dtype: of the parameters.
        load_format: "safetensors", or "dummy" for seeded random weights.
        max_positions: longest sequence, in tokens.

    Raises:
        ConfigError: config.json is broken or does not fit the model.
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    config = Eagle3Config.from_folder(folder, model.config, max_positions=max_positions)
    if model.config.transformers is not None:
        raise ConfigError(
            f"{folder} is an EAGLE-3 head, which reads layers that a module of transformers does "
            "not return; it needs --model-impl octavo"
        )
    with tensor_defaults(device, dtype), torch.no_grad():
        head = Eagle3Head(config)
        if load_format == "dummy":
            fill_with_random_weights(cast("CausalLM", head))
        else:
            _fill(head, folder, model)
    model.model.aux_layers = head.aux_layers
    return head.eval().requires_grad_(requires_grad=False)


def _fill(head: Eagle3Head, folder: Path, model: CausalLM) -> None:
    """Copies the stored tensors into the head."""
    stored = {
        tensor.name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for tensor in open_checkpoint(folder)
    }
    if "embed_tokens.weight" not in stored:
        head.embed_tokens = model.model.embed_tokens
    if "d2t" not in stored and len(head.d2t) != head.config.vocab_size:
        raise CheckpointError(f"{folder}: d2t is missing")
    offsets = stored.pop("d2t", None)
    if offsets is not None:
        _set_d2t(head, offsets.values, folder)
    for name in _DERIVED & stored.keys():
        del stored[name]
    copy_stored(head, stored, folder, optional={"embed_tokens.weight"})


def copy_stored(
    layers: nn.Module,
    stored: Mapping[str, CheckpointTensor],
    folder: Path,
    *,
    optional: Set[str] = frozenset(),
) -> None:
    """Copies tensors, by our names, into the modules that guess beside a model.

    optional: tensors that may be absent.

    Raises:
        CheckpointError: one is missing, unknown or of another shape.
    """
    destinations = find_destinations(cast("CausalLM", layers))
    for name in optional - stored.keys():
        del destinations[name]
    for name, tensor in stored.items():
        if name not in destinations:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} is unknown")
        destination = destinations.pop(name)
        try:
            destination.layer.weight_loader(
                destination.param,
                tensor.values.to(destination.param.device),
                destination.shard_id,
            )
        except ValueError as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
    if destinations:
        raise CheckpointError(
            f"{folder}: {len(destinations)} tensors are missing, the first is {min(destinations)}"
        )


def _set_d2t(head: Eagle3Head, offsets: torch.Tensor, folder: Path) -> None:
    """Checks and keeps the map from guesses to tokens."""
    num_tokens = len(head.d2t)
    if offsets.shape != (num_tokens,) or offsets.is_floating_point():
        raise CheckpointError(f"{folder}: d2t must have {num_tokens} integers")
    token_ids = offsets.long() + torch.arange(num_tokens, device=offsets.device)
    if token_ids.min() < 0 or token_ids.max() >= head.config.vocab_size:
        raise CheckpointError(f"{folder}: d2t leads out of the vocabulary")
    head.d2t.copy_(offsets)
