"""A norm that an operation applies to its input."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class InputNorm:
    """Root-mean-square norm of an operation's input [..., K]; see models.ops.elementwise.rms_norm.

    weight: [K].
    eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float
