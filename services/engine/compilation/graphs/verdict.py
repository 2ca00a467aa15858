"""Compares a graph's outputs with its program's, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.compilation.graphs.recorder import GraphFaultError

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Error allowed by dtype, relative to the largest output, as kernels do not always add in the same
order. A graph that reads the wrong memory is off by about 1."""


class Verdict:
    """The result of a graph's test, known once the device has compared the outputs.

    Fractions may differ by rounding; integers, such as chosen tokens, must be equal.
    """

    def __init__(self, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
        """Queues the comparison of tensors, pair by pair; later work may overwrite them."""
        pairs = zip(expected, actual, strict=True)
        errors = torch.stack([_error(*pair) for pair in pairs])
        self._tolerances = [RELATIVE_TOLERANCE.get(tensor.dtype) for tensor in expected]
        self._errors = errors
        self._is_ready: torch.cuda.Event | None = None
        if errors.is_cuda:
            self._errors = torch.empty_like(errors, device="cpu", pin_memory=True)
            self._errors.copy_(errors, non_blocking=True)
            self._is_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._is_ready.record()

    def require_same(self) -> None:
        """Waits for the comparison; raises GraphFaultError unless all pairs agree."""
        if self._is_ready is not None:
            self._is_ready.synchronize()
        for error, tolerance in zip(self._errors.tolist(), self._tolerances, strict=True):
            if tolerance is None and error:
                raise GraphFaultError(f"{error:.0f} of the integers that it computes are wrong")
            if tolerance is not None and not error <= tolerance:  # a NaN is an error too
                raise GraphFaultError(
                    f"its output is off by {error:.2g} of what the model computes"
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
