"""The layers that make a vector of a pooled hidden state."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.batch_invariance import is_batch_invariant
from models.config_sections.pooling import PoolingConfig

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda values: values,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class PoolingHead(nn.Module):
    """Maps pooled states to vectors or scores, in float32."""

    def __init__(self, config: PoolingConfig, layers: Sequence[nn.Linear]) -> None:
        """Takes the layers with their weights.

        Args:
            config: of the checkpoint.
            layers: `config.dense`, or the head for one label.
        """
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)

    def forward(self, states: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns [n, size] float32 for states [n, hidden].

        compute_logits: maps [n, hidden] of the model's dtype to [n, vocab].
        """
        config = self.config
        if config.answers is not None:
            logits = compute_logits(states)[:, list(config.answers)].float()
            return logits.softmax(dim=-1)[:, 1:]
        values = states.float()
        activations = [each.activation for each in config.dense] or [config.activation]
        for layer, activation in zip(self.layers, activations, strict=False):
            values = _ACTIVATIONS[activation](_apply(layer, values))
        return functional.normalize(values, dim=-1) if config.is_normalized else values


def _apply(layer: nn.Module, values: Tensor) -> Tensor:
    """Returns layer(values), row by row in batch-invariant mode."""
    if not is_batch_invariant() or not len(values):
        result: Tensor = layer(values)
        return result
    return torch.cat([layer(row) for row in torch.split(values, 1)])
