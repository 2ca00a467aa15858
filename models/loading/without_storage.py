"""Makes models whose weights have no memory."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutStorage(TorchFunctionMode):
    """Allocates no memory for tensors without values.

    A layer makes its weight before it is known to stay FP8; both formats of a large model's weights
    would not fit on a device together.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function of torch; torch.empty on the meta device."""
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))
