"""Refuses --batch-invariant for weights whose products would depend on the batch."""

import torch
from torch import nn

from models.layers.moe import Experts


def check_invariant_weights(model: nn.Module) -> None:
    """Refuses a format of weights that the mode does not cover.

    Raises:
        ValueError: it names the format.
    """
    for module in model.modules():
        if not isinstance(module, Experts) or module.gate_up_proj.is_cpu:
            continue
        if module.gate_up_proj.dtype is torch.uint8:
            raise ValueError(
                "--batch-invariant does not cover experts whose weights stay packed in 4 bits on a "
                "GPU: their kernels choose their tiles by the number of tokens"
            )
