"""Limits of Hopper's copy engine (TMA), and tensors within them."""

import torch

COPY_ALIGNMENT = 16
"""Bytes that every row starts at a multiple of (CUDA C++ Programming Guide, TMA)."""


def aligned_heads(x: torch.Tensor) -> torch.Tensor:
    """Returns [T, Hk, D] with heads aligned for the copy engine; copies unaligned ones."""
    starts = (x.data_ptr(), x.stride(0) * x.itemsize, x.stride(1) * x.itemsize)
    if all(start % COPY_ALIGNMENT == 0 for start in starts):
        return x
    unit = COPY_ALIGNMENT // x.itemsize
    num_tokens, num_heads, head_dim = x.shape
    padded = x.new_zeros(num_tokens, num_heads, -(-head_dim // unit) * unit)
    return padded[:, :, :head_dim].copy_(x)
