"""Loads the layers that make a vector of a pooled hidden state."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from models.config_sections.pooling import HEAD_TENSOR, DenseConfig, PoolingConfig
from models.layers.decoder import CausalLM
from models.layers.pooling import PoolingHead
from models.loading.checkpoint import CheckpointTensor, open_checkpoint
from models.loading.checkpoint_tensor import CheckpointError


def load_pooling_head(
    config: PoolingConfig,
    model: CausalLM,
    tensors: Sequence[CheckpointTensor] | None,
    device: torch.device,
) -> PoolingHead:
    """Returns the layers of a checkpoint, in float32.

    Args:
        config: of the checkpoint.
        model: whose states are pooled.
        tensors: of the checkpoint; None leaves the layers random.
        device: of the layers.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    layers = []
    for each in config.dense:
        layer = nn.Linear(each.in_features, each.out_features, each.has_bias, dtype=torch.float32)
        if tensors is not None:
            _fill_dense(layer, each)
        layers.append(layer)
    if config.task == "score" and config.answers is None:
        layer = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float32)
        if tensors is not None:
            _fill(layer.weight, HEAD_TENSOR, tensors)
        layers.append(layer)
    sizes = [model.config.hidden_size, *(each.out_features for each in config.dense)]
    for size, each in zip(sizes, config.dense, strict=False):
        if each.in_features != size:
            raise CheckpointError(
                f"{each.folder}: in_features is {each.in_features}; the vectors have {size}"
            )
    return PoolingHead(config, layers).requires_grad_(requires_grad=False).to(device)


def _fill_dense(layer: nn.Linear, config: DenseConfig) -> None:
    tensors = open_checkpoint(config.folder)
    _fill(layer.weight, "linear.weight", tensors)
    if config.has_bias:
        _fill(layer.bias, "linear.bias", tensors)


def _fill(values: Tensor, name: str, tensors: Sequence[CheckpointTensor]) -> None:
    """Copies the stored tensor of a name."""
    found = next((each for each in tensors if each.name == name), None)
    where: Path | str = tensors[0].file if tensors else "the checkpoint"
    if found is None:
        raise CheckpointError(f"{where}: tensor {name} is missing")
    if found.values.shape != values.shape:
        raise CheckpointError(
            f"{where}: tensor {name} has the shape {list(found.values.shape)}; it must be "
            f"{list(values.shape)}"
        )
    values.data.copy_(found.values)
