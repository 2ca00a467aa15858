"""Measures the difference of two tensors, and of the tokens that they lead to."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kv_cache import FP8_CACHE_DTYPE
from services.engine.compilation.graphs.verdict import RELATIVE_TOLERANCE
from services.engine.replay.recording import ReplayError

FP8_STEP = 0.125
"""Largest distance of adjacent float8_e4m3fn values, relative to the smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The difference between a tensor and its expected value.

    error: largest difference of an element, relative to the largest element; NaN if either has one.
    """

    name: str
    error: float
    tolerance: float

    @property
    def is_exact(self) -> bool:
        """Whether the tensors are bit-equal."""
        return self.error == 0

    @property
    def is_excessive(self) -> bool:
        """Whether rounding cannot explain it."""
        return not self.error <= self.tolerance  # NaN is excessive too


def deviation(name: str, expected: Tensor, actual: Tensor, dtype: torch.dtype) -> Deviation:
    """Compares a tensor with its expected value.

    Args:
        name: its name in reports.
        expected: of any shape; 8-bit floats may differ by a step, as values near the middle round
            either way.
        actual: of the same shape.
        dtype: of the model, which decides the tolerance.
    """
    tolerance = RELATIVE_TOLERANCE[dtype]
    if expected.dtype == FP8_CACHE_DTYPE:
        tolerance = FP8_STEP
        expected, actual = expected.float(), actual.float()
    if torch.equal(expected, actual):
        return Deviation(name=name, error=0.0, tolerance=tolerance)
    exact = expected.double()
    # Equal infinities are no difference, and they are no scale.
    difference = (actual.double() - exact).abs().masked_fill(expected == actual, 0)
    scale = exact.abs().masked_fill(exact.isinf(), 0).max().clamp(min=torch.finfo(dtype).tiny)
    return Deviation(name=name, error=float(difference.max() / scale), tolerance=tolerance)


def first_difference(expected: Tensor, actual: Tensor) -> int:
    """Returns the first index along the first dimension where two tensors differ; NaN differs."""
    differs = (expected.float() != actual.float()).view(len(expected), -1).any(1)
    return int(differs.int().argmax())


def margin(logits: torch.Tensor, values: Iterable[int | None]) -> float:
    """Returns the spread of some tokens' logits [V], relative to the largest logit.

    Raises:
        ReplayError: a token is not in the vocabulary.
    """
    token_ids = {value for value in values if value is not None}
    if not all(0 <= token_id < len(logits) for token_id in token_ids):
        raise ReplayError(f"one of the tokens {sorted(token_ids)} is not among {len(logits)} ids")
    chosen = logits[list(token_ids)]
    return float((chosen.max() - chosen.min()) / logits.abs().max())
