"""Which steps a captured graph may hold, by implementation of attention."""

import enum

import torch

from models.ops.kernel_choice import has_kernels


class AttentionCGSupport(enum.IntEnum):
    """Steps whose attention may run inside a captured graph; a larger value allows more."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Steps in which every request has one token."""
    UNIFORM_BATCH = 2
    """Steps in which every request has equally many tokens."""
    ALWAYS = 3
    """All steps."""


def attention_cudagraph_support(device: torch.device) -> AttentionCGSupport:
    """Returns the steps that attention on `device` supports.

    The kernels read lengths and block tables from device memory, and their grids depend only on the
    number of tokens and requests. The reference plans each step on the host.
    """
    return AttentionCGSupport.ALWAYS if has_kernels(device) else AttentionCGSupport.NEVER
