"""Rounds activations to FP8 inside the kernels of experts."""

import triton
import triton.language as tl

from models.number_formats import FP8_MAX, SMALLEST_AMAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def rounded(x):
    """Returns rows of one run of features in FP8, and their scales, [rows] float32.

    Computes models.ops.products.fp8_linear.quantize; absent features are 0.
    """
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST_AMAX) / _FP8_MAX
    scaled = tl.minimum(tl.maximum(x / scale[:, None], -_FP8_MAX), _FP8_MAX)
    return scaled.to(tl.float8e4nv), scale
