"""Settings and operations that all families of image processors have."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

Grid = tuple[int, ...]
"""Positions of an image's patches, as its family defines them."""
Side = Annotated[int, Field(ge=1, le=2**16)]
"""Pixels along one side of a picture, or fewer."""
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
NUM_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Patches:
    """An image's patches and their positions."""

    grid: Grid
    values: NDArray[np.uint8]
    """[N, C * P * P]: N patches of C channels and P by P pixels, contiguous."""


class Family(BaseModel, ABC):
    """One model's image processor, as GetModelInfo's `ImageProcessor.settings` describes it.

    The encoder rescales and normalizes, so this side never reads `rescale_factor`, `image_mean` and
    `image_std`; they are part of the settings because digests cover them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    patch_size: Side
    """Pixels along a patch's side."""
    resample: Annotated[int, Field(ge=0, le=5)]
    """Pillow's number of the filter that resizes."""
    rescale_factor: float
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    @abstractmethod
    def min_patches(self) -> int:
        """Patches of the smallest image."""

    @abstractmethod
    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes and cuts an RGB image.

        Args:
            image: the picture, upright.
            max_patches: shrinks larger images to about this number, at least `min_patches`.
            is_only_image: whether its prompt has no other image.

        Raises:
            InvalidRequestError: the family cannot represent its shape.
        """

    @abstractmethod
    def num_patches(self, grid: Grid) -> int:
        """Returns the number of patches that a grid describes.

        Raises:
            ValueError: it is no grid of this family.
        """

    @abstractmethod
    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns the prompt tokens of an image; `image_token_id` is where encoder vectors go."""

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch."""
        return NUM_CHANNELS * self.patch_size**2

    def _resized(self, image: Image.Image, height: int, width: int) -> Image.Image:
        return image.resize((width, height), Image.Resampling(self.resample))


class WindowFamily(Family):
    """A family whose windows of patches each become one token. A grid is (height, width)."""

    merge_size: Side
    """Patches along the side of a window that becomes one token."""

    @property
    def min_patches(self) -> int:
        """Patches of one window."""
        return self.merge_size**2

    def num_patches(self, grid: Grid) -> int:
        """Returns height times width."""
        total = product(grid, 2, num_factors=2)
        if any(side % self.merge_size for side in grid):
            raise ValueError(f"a grid {grid} that is not made of windows of {self.merge_size}")
        return total

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each window."""
        return (image_token_id,) * (self.num_patches(grid) // self.merge_size**2)


def product(grid: Grid, length: int, *, num_factors: int) -> int:
    """Returns the product of a grid's first values.

    Raises:
        ValueError: the grid has another length, or a value is not positive.
    """
    if len(grid) != length or min(grid) < 1:
        raise ValueError(f"a grid {grid} instead of {length} positive integers")
    total = 1
    for factor in grid[:num_factors]:
        total *= factor
    return total


def patchify(image: Image.Image, patch_size: int, *, merge_size: int = 1) -> NDArray[np.uint8]:
    """Cuts an RGB image into patches, window by window of `merge_size` squared patches.

    Pixels to the right of and below the last whole patch are left out, as strided convolutions do.

    Returns:
        [N, C * P * P], channels first in each patch.
    """
    rows, columns = image.height // patch_size, image.width // patch_size
    # A line of a patch is one element: numpy then copies 16 bytes at a time, five times as fast.
    line = np.dtype((np.void, patch_size))
    windows = (rows // merge_size, columns // merge_size, merge_size, merge_size)
    patches = np.empty((*windows, NUM_CHANNELS, patch_size), line)
    for channel, band in enumerate(image.split()):
        pixels = np.asarray(band)[: rows * patch_size, : columns * patch_size]
        lines = np.ascontiguousarray(pixels).view(line)
        split = lines.reshape(windows[0], merge_size, patch_size, windows[1], merge_size)
        patches[..., channel, :] = split.transpose(0, 3, 1, 4, 2)
    return patches.view(np.uint8).reshape(rows * columns, NUM_CHANNELS * patch_size**2)
