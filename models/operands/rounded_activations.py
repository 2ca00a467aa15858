"""Activations that are rounded to FP8 in their own memory, as attention leaves them for a product.

One tensor holds either form, so that its shape and its address do not depend on which one it is.
"""

import torch

from models.number_formats import BLOCK, FP8
from models.operands.token_scales import TOKEN_ALIGNMENT


def rounded_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views of x's memory that hold its elements rounded to FP8, and their scales.

    The values take as many bytes as x has elements. The scales follow, as empty_token_scales has
    them: one of each 128 features takes 4 bytes of the 128 or more that are left.

    Args:
        x: [T, ...], contiguous, of 2 bytes or more; a token has K elements, a multiple of 128.

    Returns:
        Values [T, K] FP8 and scales [T, K / 128] float32.
    """
    num_tokens, size = len(x), x.shape[1:].numel()
    stride = -(-num_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
    # Each view counts its offset in elements of its own dtype.
    values, scales = x.view(FP8), x.view(torch.float32)
    first_scale = scales.storage_offset() + num_tokens * size // scales.itemsize
    return (
        values.as_strided((num_tokens, size), (size, 1)),
        scales.as_strided((num_tokens, size // BLOCK), (1, stride), first_scale),
    )
