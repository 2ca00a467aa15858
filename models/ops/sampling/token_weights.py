"""Integer weights of tokens in a draw.

The most likely token weighs 2**44, any other 2**44 * exp((logit - largest) / temperature), rounded
down. Integer sums do not depend on the order of their terms, so every split of a row and every
device keeps and draws the same tokens. exp2 is written in operations that every device rounds in
the same way.
"""

import torch
from torch import Tensor

from models.operands.base_two import LOG2_E
from models.operands.draws import (
    EXP2_TERMS,
    FRACTION_BITS,
    MAX_HALVINGS,
    MIN_TEMPERATURE,
    WEIGHT_BITS,
)


def scale_of(temperature: Tensor) -> Tensor:
    """Returns the halvings of the weight per unit of logit, [S] float32."""
    return LOG2_E / temperature.clamp(min=MIN_TEMPERATURE)


def weights_at(depths: Tensor, scales: Tensor) -> Tensor:
    """Returns the weights of tokens, [S, n] int64 in [0, 2**44].

    depths: [S, n] float32, how far each logit is below its row's largest.
    scales: [S] float32, from `scale_of`.
    """
    halvings = depths * scales[:, None]
    # Also catches NaN: comparisons with it are false.
    halvings = torch.where(halvings < MAX_HALVINGS, halvings, MAX_HALVINGS)
    whole = (halvings + 0.5).int()
    rest = whole.float() - halvings
    power = torch.full_like(rest, EXP2_TERMS[-1])
    for term in EXP2_TERMS[-2::-1]:
        power = power * rest + term
    mantissa = (power * 2.0**FRACTION_BITS).long()
    return (mantissa << (WEIGHT_BITS - FRACTION_BITS)) >> whole
