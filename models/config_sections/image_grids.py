"""How many patches and vectors an image has, by its grid."""

from math import isqrt, prod

from models.config_sections.vision import VisionConfig

MAX_SIDE = 2**16


def num_patches(vision: VisionConfig, grid: tuple[int, ...]) -> int:
    """Returns the patches of an image.

    Raises:
        ValueError: the family has no such grid.
    """
    _check(vision, grid)
    return prod(grid)


def num_vectors(vision: VisionConfig, grid: tuple[int, ...]) -> int:
    """Returns the vectors that an image becomes.

    Raises:
        ValueError: the family has no such grid.
    """
    _check(vision, grid)
    return prod(grid) // vision.merge**2


def largest_grid(vision: VisionConfig, max_vectors: int) -> tuple[int, ...]:
    """Returns the grid of an image with about as many vectors, and no more."""
    side = isqrt(max_vectors) * vision.merge
    return side, side


def _check(vision: VisionConfig, grid: tuple[int, ...]) -> None:
    if len(grid) != 2 or not all(0 < side <= MAX_SIDE for side in grid):
        raise ValueError("it must be a height and a width in patches")
    if any(side % vision.merge for side in grid):
        raise ValueError(f"its sides must be multiples of {vision.merge}")
