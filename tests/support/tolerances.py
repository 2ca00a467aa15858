"""Tolerances of kernels against float64 arithmetic on the same inputs, by dtype."""

import torch

ROW_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a row, ||actual - exact|| / ||exact||: some roundings of 2^-24, 2^-11, 2^-9."""

FP8_ROW_TOLERANCE = 2**-4 + 1e-3
"""Largest error of a head in the cache as float8_e4m3fn: each number's is at most 2^-4 of it, or of
the head's largest number 2^-10 / 448."""

FP8_PRODUCT_ROW_TOLERANCE = 2**-7
"""Largest error of a row of an FP8 product against the exact one of the same rounded numbers: of
128 products that tensor cores add, each is cut off 14 bits below the largest."""

FP8_EXPERTS_ERROR = 0.08
"""Largest error of experts whose activations are rounded to FP8, relative to the norm, against the
same with activations as they are."""


def assert_rows_close(
    actual: torch.Tensor, exact: torch.Tensor, tolerance: float | None = None
) -> None:
    """Compares along the last dimension, row by row, so that one wrong row among many is seen.

    Without a tolerance it is that of actual's dtype. A row that nearly cancels counts as half as
    long as rows are: bfloat16 alone is off by 0.05 in one of 200,000 rows of 7 features.
    """
    actual_exactly = actual.double().cpu()
    error = (actual_exactly - exact.double().cpu()).norm(dim=-1)
    scale = exact.double().cpu().norm(dim=-1)
    usual = float(scale.square().mean().sqrt())
    scale = scale.clamp(min=max(usual / 2, 1e-30))
    worst = float((error / scale).max())
    # A comparison with NaN is false.
    assert worst <= (tolerance or ROW_TOLERANCE[actual.dtype]), (
        f"a row is off by {worst:.2g} of its norm"
    )
