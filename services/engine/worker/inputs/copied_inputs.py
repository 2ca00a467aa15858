"""A forward pass that reads copies of its inputs, for `--cudagraph-copy-inputs`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class CopiedInputs:
    """A forward pass whose inputs are always at the same addresses, wherever a step's are."""

    def __init__(self, forward: Callable[..., Any], largest: Sequence[Tensor]) -> None:
        """Allocates the copies.

        Args:
            forward: the pass; each of its inputs varies in dimension 0 only.
            largest: inputs of the largest step, any content.
        """
        self._forward = forward
        self._copies = [each.new_zeros(each.shape) for each in largest]

    def __call__(self, *inputs: Tensor) -> Any:
        """Copies a step's inputs and runs the model on the copies."""
        places = [copy[: len(each)] for copy, each in zip(self._copies, inputs, strict=True)]
        for place, each in zip(places, inputs, strict=True):
            place.copy_(each)
        return self._forward(*places)
