"""Counts what a network does with one of its inputs."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class InputUses(TorchFunctionMode):
    """Counts the functions that read a tensor while it is entered."""

    def __init__(self, watched: Tensor) -> None:
        """Watches one tensor; views of it are others, but making one reads it."""
        super().__init__()
        self._watched = watched
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch; a look at a shape, dtype or device reads no values."""
        kwargs = kwargs or {}
        is_getter = getattr(func, "__name__", "") == "__get__"
        if not is_getter and any(leaf is self._watched for leaf in tree_leaves((args, kwargs))):
            self.count += 1
        return func(*args, **kwargs)
