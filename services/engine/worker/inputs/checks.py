"""Checks of a step's descriptor, and the arrays that it holds."""

from typing import NoReturn

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def is_below(values: Int32Array | Int64Array, limit: int) -> bool:
    """Returns whether all values are at least 0 and below a limit."""
    return not len(values) or bool(values.min() >= 0 and values.max() < limit)


def require(condition: bool, found: str) -> None:
    """Raises ValueError unless a condition of the descriptor holds; `found` says what it has."""
    if not condition:
        refuse(found)


def refuse(found: str) -> NoReturn:
    """Raises ValueError, as the descriptor has what it must not have."""
    raise ValueError(f"the step's descriptor is invalid: it has {found}")
