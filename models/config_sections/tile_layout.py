"""Layout of the tiles of an image in LLaVA-OneVision, and of the vectors that they become.

Source: transformers 5.24, models/llava_onevision, pack_image_features and select_best_resolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

LEAST_SHRINKING = 1.1
"""Factor by which images must exceed the most vectors before they are resized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """How the vectors of an image's tiles are laid out, in vectors.

    rows, columns: of tiles. top, left: rows above, and columns left of the image, that are padding,
    and so are as many at the other end. height, width: of what remains, perhaps resized.
    """

    rows: int
    columns: int
    top: int
    left: int
    height: int
    width: int

    @classmethod
    def of(
        cls,
        image_size: tuple[int, int],
        resolutions: Sequence[tuple[int, int]],
        *,
        side: int,
        patch_size: int,
        max_tiles: int,
    ) -> "TileLayout":
        """Returns the layout of an image.

        Args:
            image_size: height and width in pixels.
            resolutions: heights and widths that images are resized to.
            side: patches on each side of a tile.
            patch_size: pixels on each side of a patch.
            max_tiles: tiles' worth of vectors; more are resized.
        """
        image_height, image_width = image_size
        size = best_resolution(image_height, image_width, resolutions)
        rows, columns = (each // (side * patch_size) for each in size)
        height, width = rows * side, columns * side
        top = left = 0
        if image_width / image_height > width / height:
            top = (height - int(round(image_height * (width / image_width), 7))) // 2
        else:
            left = (width - int(round(image_width * (height / image_height), 7))) // 2
        height, width = height - 2 * top, width - 2 * left
        shrinking = sqrt(height * width / (max_tiles * side**2))
        if shrinking > LEAST_SHRINKING:
            height, width = int(height // shrinking), int(width // shrinking)
        return cls(rows=rows, columns=columns, top=top, left=left, height=height, width=width)

    @property
    def num_tiles(self) -> int:
        """Tiles of the image, without its overview."""
        return self.rows * self.columns


def best_resolution(
    height: int, width: int, resolutions: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the resolution that keeps the most pixels of an image, then the smallest of these."""

    def fit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), height * width)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=fit)
