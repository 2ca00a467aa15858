"""Loads an assistant of Gemma 4 beside its model."""

from pathlib import Path
from typing import cast

import torch

from models.gemma4_assistant import AssistantLayers
from models.gemma4_assistant_config import AssistantConfig
from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError, CheckpointTensor, open_checkpoint
from models.loading.dummy import fill_with_random_weights
from models.loading.eagle3 import copy_stored
from models.loading.loader import tensor_defaults

_ORDER = "token_ordering"


def load_assistant(
    folder: Path,
    model: CausalLM,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
) -> AssistantLayers:
    """Builds the assistant in a folder; ranks share its heads as they share the model's.

    Args:
        folder: config.json and weights.
        model: whose tokens it guesses and whose cache it reads.
        device: of the parameters.
        dtype: of the parameters.
        load_format: "safetensors", or "dummy" for seeded random weights.

    Raises:
        ConfigError: config.json is broken or does not fit the model.
        CheckpointError: a tensor is missing, unknown or of another shape.
    """
    config = AssistantConfig.from_folder(folder, model.config)
    with tensor_defaults(device, dtype), torch.no_grad():
        layers = AssistantLayers(config, model.config.hidden_size, model.lm_head.group)
        if load_format == "dummy":
            fill_with_random_weights(cast("CausalLM", layers))
        else:
            stored = _stored(folder)
            order = stored.pop(_ORDER, None)
            if layers.centroids is not None:
                _set_order(layers, order, folder)
            copy_stored(layers, stored, folder)
    return layers.eval().requires_grad_(requires_grad=False)


def _stored(folder: Path) -> dict[str, CheckpointTensor]:
    """Returns the tensors by our names: of embedding and head, which may be tied, the head."""
    stored = {
        tensor.name.removeprefix("model.").removeprefix("masked_embedding."): tensor
        for tensor in open_checkpoint(folder)
    }
    embedding = stored.pop("embed_tokens.weight", None)
    if embedding is not None:
        stored.setdefault("lm_head.weight", embedding)
    return stored


def _set_order(layers: AssistantLayers, order: CheckpointTensor | None, folder: Path) -> None:
    """Checks and keeps the tokens of each group."""
    if order is None:
        raise CheckpointError(f"{folder}: {_ORDER} is missing")
    values, kept = order.values, layers.token_ordering
    if values.shape != (kept.numel(),) or values.is_floating_point():
        raise CheckpointError(f"{folder}: {_ORDER} must have {kept.numel()} integers")
    if values.min() < 0 or values.max() >= kept.numel():
        raise CheckpointError(f"{folder}: {_ORDER} leads out of the vocabulary")
    kept.copy_(values.view_as(kept))
