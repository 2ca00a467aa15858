"""Decides which products round their activations to FP8."""

import torch

from models.ops.triton.linear.linear_configurations import MOST_TOKENS


def rounds_activations(num_tokens: int, dtype: torch.dtype) -> bool:
    """Returns whether products with FP8 weights round their activations, of `dtype`, to FP8.

    A product of few tokens takes as long as reading its weight, which rounding does not shorten. It
    multiplies bfloat16 as it is. More tokens are bound by arithmetic, which is twice as fast in
    FP8. No other fact about a step or a layer changes a product's activations.
    """
    return dtype is not torch.bfloat16 or num_tokens > MOST_TOKENS
