"""Where the patches of images are, as the host works it out once for each grid."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IMAGE_ROWS = ("row", "column", "height", "width", "start", "end")
"""Rows of `image_layout`."""

_MOST_GRIDS = 64
"""Grids that are remembered. An image of a megapixel takes 100 KiB, the largest some MiB."""


def image_layout(
    grids: Sequence[tuple[int, int]], side: int, *, sides: Sequence[int] = ()
) -> NDArray[np.int32]:
    """Returns facts about the patches of images, which come in squares of side x side.

    Each patch's row and column, its image's height and width, and its image's first patch and the
    one after its last. Then, for each of `sides`, which patch is next in squares of these sides,
    where patches come row by row.

    Args:
        grids: height and width of each image, in patches.
        side: of the squares; 1 if patches come row by row.
        sides: of other squares.

    Returns:
        [6 + len(sides), N].
    """
    parts, first = [], 0
    for height, width in grids:
        own = _of_image(height, width, side, tuple(sides)).copy()
        own[4:] += first
        parts.append(own)
        first += height * width
    return np.concatenate([np.empty((6 + len(sides), 0), np.int32), *parts], axis=1)


def window_layout(
    grids: Sequence[tuple[int, int]], side: int, window: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Orders the squares of images by windows; those at the ends of rows may be smaller.

    Args:
        grids: height and width of each image, in patches.
        side: of a square, in patches.
        window: side of a window, in squares.

    Returns:
        Which patch comes next, [N]; the bounds of each one's window, [2, N]; and for each patch the
        place of its square among the ordered ones, [N].
    """
    parts, first = [], 0
    for height, width in grids:
        own = _of_windows(height, width, side, window).copy()
        own[:3] += first
        own[3] += first // side**2
        parts.append(own)
        first += height * width
    layout = np.concatenate([np.empty((4, 0), np.int32), *parts], axis=1)
    return layout[0], layout[1:3], layout[3]


def squares_first(height: int, width: int, side: int) -> NDArray[np.int64]:
    """Returns rows and columns, [2, height * width], of patches ordered by squares.

    Squares of side x side patches come row by row, and so do the patches in each.
    """
    rows, columns = np.indices((height, width))
    squares = (height // side, side, width // side, side)
    return np.stack([each.reshape(squares).swapaxes(1, 2).ravel() for each in (rows, columns)])


@lru_cache(maxsize=_MOST_GRIDS)
def _of_image(height: int, width: int, side: int, sides: tuple[int, ...]) -> NDArray[np.int32]:
    """Returns `image_layout` of the first image."""
    count = height * width
    layout = np.empty((6 + len(sides), count), np.int32)
    layout[:2] = squares_first(height, width, side)
    layout[2:6] = np.array([height, width, 0, count])[:, None]
    for number, other in enumerate(sides):
        rows, columns = squares_first(height, width, other)
        layout[6 + number] = rows * width + columns
    return layout


@lru_cache(maxsize=_MOST_GRIDS)
def _of_windows(height: int, width: int, side: int, window: int) -> NDArray[np.int32]:
    """Returns the order of patches, start, end, and place of squares, of the first image."""
    square = side**2
    rows, columns = np.indices((height // side, width // side)) // window
    number = (rows * -(-width // side // window) + columns).ravel()
    order = number.argsort(kind="stable")
    layout = np.empty((4, height * width), np.int32)
    layout[0] = (order[:, None] * square + np.arange(square)).ravel()
    ends = np.bincount(number).cumsum() * square
    of_patch = number[order].repeat(square)
    layout[1] = np.concatenate([[0], ends[:-1]])[of_patch]
    layout[2] = ends[of_patch]
    layout[3] = order.argsort().repeat(square)
    return layout
