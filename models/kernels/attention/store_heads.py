"""How attention kernels store their results: as they are, or rounded to FP8 for a product."""

import triton
import triton.language as tl

from models.number_formats import FP8_MAX, SMALLEST_AMAX

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def store_heads(
    heads, output_ptr, scale_ptr, at_heads, at_scales, in_tile, in_rows, DTYPE: tl.constexpr
):
    """Stores the outputs of some heads, [ROWS, HEAD_DIM], at `at_heads` where in_tile.

    Unless scale_ptr is None, rounds each row to DTYPE and then to FP8, with a scale at `at_scales`:
    what fp8_linear.quantize makes of it, as HEAD_DIM features share a scale.
    """
    if scale_ptr is None:
        tl.store(output_ptr + at_heads, heads.to(output_ptr.dtype.element_ty), mask=in_tile)
    else:
        exact = heads.to(DTYPE).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(exact), 1), _SMALLEST_AMAX) / _FP8_MAX
        scaled = tl.minimum(tl.maximum(exact / scale[:, None], -_FP8_MAX), _FP8_MAX)
        # In one more dimension: loads of a tile's shape would take the layout of this store, which
        # is that of 8 bits, and sums over what they load another order than without rounding.
        at_tile = (output_ptr + at_heads)[None, :, :]
        tl.store(
            at_tile, scaled.to(output_ptr.dtype.element_ty)[None, :, :], mask=in_tile[None, :, :]
        )
        tl.store(scale_ptr + at_scales, scale, mask=in_rows)
