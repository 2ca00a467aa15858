"""Decides which products round their activations to FP8."""

import torch

from models.batch_invariance import is_batch_invariant


def rounds_activations(num_tokens: int, dtype: torch.dtype) -> bool:
    """Returns whether products with FP8 weights round their activations, of `dtype`, to FP8.

    A product of one token takes as long as reading its weight, which rounding does not shorten. It
    multiplies bfloat16 as it is. With more tokens a weight would have to become bfloat16 for the
    tensor cores, which takes longer than reading it. No other fact about a step or a layer changes
    a product's activations.
    """
    return dtype is not torch.bfloat16 or num_tokens > 1


def leaves_rounded(x: torch.Tensor, *, may_round: bool) -> bool:
    """Returns whether attention rounds its output x [T, ...] for the product that reads it.

    x is then what rounded_parts describes. The operators of both get the same may_round. Batch
    invariance has kernels of its own. A GPU's kernels do not round float32: its last bits differ
    between a kernel that rounds and one that does not, as the compiler orders them.
    """
    is_wide = x.is_cuda and x.dtype is torch.float32
    rounds = may_round and rounds_activations(x.shape[0], x.dtype)
    return rounds and not is_wide and not is_batch_invariant()
