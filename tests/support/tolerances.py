"""How far a kernel may be from float64 arithmetic on the same inputs, by dtype."""

import torch

ROW_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a row, ||actual - exact|| / ||exact||: some roundings of 2^-24, 2^-11, 2^-9."""


def assert_rows_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Compares along the last dimension, row by row, so that one wrong row among many is seen."""
    actual_exactly = actual.double().cpu()
    error = (actual_exactly - exact.double().cpu()).norm(dim=-1)
    scale = exact.double().cpu().norm(dim=-1).clamp(min=1e-30)
    worst = float((error / scale).max())
    # A comparison with NaN is false.
    assert worst <= ROW_TOLERANCE[actual.dtype], f"a row is off by {worst:.2g} of its norm"
