"""Compares a graph's outputs with its program's, without waiting for the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.compilation.graphs.recorder import GraphFaultError

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Error allowed by dtype, relative to the largest output, as kernels do not always add in the same
order. A graph that reads the wrong memory is off by about 1."""


class Comparison(NamedTuple):
    """The difference of two tensors, under way on the device."""

    error: Tensor
    """Float32; integers count unequal elements."""
    dtype: torch.dtype
    of: str
    """The subject of the error."""


def compare(expected: Tensor, actual: Tensor, *, of: str = "its output") -> Comparison:
    """Queues the comparison of two tensors; later work may overwrite them."""
    return Comparison(_error(expected, actual), expected.dtype, of)


class Verdict:
    """The result of a graph's test, known once the device has compared the outputs.

    Fractions may differ by rounding; integers, such as chosen tokens, must be equal.
    """

    def __init__(
        self,
        expected: Sequence[Tensor],
        actual: Sequence[Tensor],
        others: Sequence[Comparison] = (),
    ) -> None:
        """Queues the comparison of tensors, pair by pair; later work may overwrite them.

        Args:
            expected: what the program computed.
            actual: what its graph computed.
            others: comparisons under way.
        """
        pairs = zip(expected, actual, strict=True)
        comparisons = [*(compare(*pair) for pair in pairs), *others]
        errors = torch.stack([comparison.error for comparison in comparisons])
        self._comparisons = [each._replace(error=torch.empty(0)) for each in comparisons]
        self._errors = errors
        self._compared: torch.cuda.Event | None = None
        if errors.is_cuda:
            self._errors = torch.empty_like(errors, device="cpu", pin_memory=True)
            self._errors.copy_(errors, non_blocking=True)
            self._compared = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._compared.record()

    @property
    def is_ready(self) -> bool:
        """Whether `require_same` does not wait."""
        return self._compared is None or self._compared.query()  # type: ignore[no-untyped-call]  # torch

    def require_same(self) -> None:
        """Waits for the comparison; raises GraphFaultError unless all pairs agree."""
        if self._compared is not None:
            self._compared.synchronize()
        for error, comparison in zip(self._errors.tolist(), self._comparisons, strict=True):
            tolerance = RELATIVE_TOLERANCE.get(comparison.dtype)
            if tolerance is None and error:
                raise GraphFaultError(f"{error:.0f} of the integers that it computes are wrong")
            if tolerance is not None and not error <= tolerance:  # a NaN is an error too
                raise GraphFaultError(
                    f"{comparison.of} is off by {error:.2g} of what the model computes"
                )


def _error(expected: Tensor, actual: Tensor) -> Tensor:
    """Returns the difference of two tensors, float32; integers count unequal elements."""
    if expected.is_floating_point():
        return _relative_error(expected, actual)
    return (actual != expected).sum().float()


def _relative_error(expected: Tensor, actual: Tensor) -> Tensor:
    """Returns the largest difference relative to the largest element."""
    differences = (actual - expected).abs_()
    differences.masked_fill_(actual == expected, 0.0)  # infinities that are equal
    largest = differences.max().float()
    return torch.where(largest == 0.0, largest, largest / expected.abs().max().float())
