"""Scales that a checkpoint brings for keys and values in a cache of 8 bits.

The cache scales each head of each token by its own magnitude, which is never coarser. So these
scales are checked, and change nothing.
"""

import re

from models.loading.checkpoint import CheckpointError, CheckpointTensor

_NAME = re.compile(
    r"\.(?:self_attn|mixer)\.(?:.+\.)?(?:[qkv]_scale|kv_scale|prob_scale|(?:[qkv]_proj|kv_b_proj|kv)"
    r"\.output_scale|prob_output_scale)$"
)
"""Of compressed-tensors and vLLM, AutoFP8, ModelOpt, and Quark."""


def is_cache_scale(name: str) -> bool:
    """Returns whether a tensor scales what attention caches or multiplies."""
    return _NAME.search(name) is not None


def check_cache_scale(tensor: CheckpointTensor) -> None:
    """Raises CheckpointError unless the scale is of positive finite numbers."""
    values = tensor.values
    is_float = values.is_floating_point() and bool(values.numel())
    if not is_float or not bool((values.float().isfinite() & (values.float() > 0)).all()):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name}: a scale of cached keys or values must be a "
            "positive number"
        )
