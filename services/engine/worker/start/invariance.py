"""Refuses --batch-invariant for weights whose products would depend on the batch."""

import torch
from torch import nn

from models.kernels.experts.expert_forms import takes_cores
from models.layers.experts import Experts


def check_invariant_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a format of weights that the mode does not cover.

    Raises:
        ValueError: it names the format.
    """
    for module in model.modules():
        if not isinstance(module, Experts) or module.gate_up_proj.dtype is not torch.uint8:
            continue
        device = module.gate_up_proj.device
        if device.type != "cpu" and not takes_cores(dtype, device):
            raise ValueError(
                "--batch-invariant covers experts whose weights stay packed in 4 bits on a Hopper "
                f"GPU in bfloat16, not {device} in {str(dtype).removeprefix('torch.')}: other "
                "kernels choose their tiles by the number of tokens"
            )
