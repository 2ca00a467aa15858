"""Decides which products round their activations to FP8."""

import torch


def rounds_activations(num_tokens: int, dtype: torch.dtype) -> bool:
    """Returns whether products with FP8 weights round their activations, of `dtype`, to FP8.

    A product of one token takes as long as reading its weight, which rounding does not shorten. It
    multiplies bfloat16 as it is. With more tokens a weight would have to become bfloat16 for the
    tensor cores, which takes longer than reading it. No other fact about a step or a layer changes
    a product's activations.
    """
    return dtype is not torch.bfloat16 or num_tokens > 1
