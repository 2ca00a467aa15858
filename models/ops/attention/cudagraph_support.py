"""Which steps a captured graph may hold, by implementation of attention."""

import enum

import torch

from models.kernels.gpu import has_kernels


class AttentionCGSupport(enum.IntEnum):
    """Steps whose attention may run inside a captured graph; a larger value allows more."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Steps in which every request has one token."""
    UNIFORM_BATCH = 2
    """Steps in which every request has equally many tokens."""
    ALWAYS = 3
    """All steps."""


def attention_cudagraph_support(
    device: torch.device, *, caches_new_keys: bool = False
) -> AttentionCGSupport:
    """Returns the steps that our attention supports on `device`.

    The kernels read lengths and block tables from device memory, and their grids depend only on the
    number of tokens and requests. The reference plans each step on the host, except on a CPU, where
    operations are recorded with attention over full block tables.

    Args:
        device: where attention runs.
        caches_new_keys: even the keys of the step are read from the cache, by chunks that begin
            their sequence too. In the test of a graph of prompts that would be the null block,
            which many tokens of one step overwrite in any order.
    """
    if device.type == "cpu":
        return AttentionCGSupport.ALWAYS
    if not has_kernels(device):
        return AttentionCGSupport.NEVER
    return AttentionCGSupport.UNIFORM_BATCH if caches_new_keys else AttentionCGSupport.ALWAYS
