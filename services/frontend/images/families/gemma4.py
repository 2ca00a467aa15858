"""Gemma 4: the largest size with an image's shape that has a number of tokens or fewer."""

import math
from typing import Annotated

from PIL import Image
from pydantic import Field

from services.frontend.errors import InvalidRequestError
from services.frontend.images.families.family import (
    Family,
    Grid,
    Patches,
    Side,
    TokenId,
    patchify,
    product,
)


class Gemma4(Family):
    """Settings of transformers' Gemma4ImageProcessor. A grid is (height, width) in patches."""

    merge_size: Side
    """Patches along the side of a square that becomes one token."""
    max_soft_tokens: Annotated[int, Field(ge=1, le=2**16)]
    """Tokens of an image; few have fewer."""
    start_token_id: TokenId
    end_token_id: TokenId
    """Enclose an image's tokens."""

    @property
    def min_patches(self) -> int:
        """Patches of one square."""
        return self.merge_size**2

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes to whole squares and cuts row by row."""
        height, width = self.resized_size(image.height, image.width, max_patches=max_patches)
        values = patchify(self._resized(image, height, width), self.patch_size)
        return Patches((height // self.patch_size, width // self.patch_size), values)

    def num_patches(self, grid: Grid) -> int:
        """Returns height times width."""
        total = product(grid, 2, num_factors=2)
        if any(side % self.merge_size for side in grid):
            raise ValueError(f"a grid {grid} that is not made of squares of {self.merge_size}")
        return total

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each square between a start and an end."""
        image = (image_token_id,) * (self.num_patches(grid) // self.merge_size**2)
        return (self.start_token_id, *image, self.end_token_id)

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to.

        Source: `get_aspect_ratio_preserving_size` in transformers 5.24,
        image_processing_pil_gemma4.py.

        Raises:
            InvalidRequestError: the image is too long for its width.
        """
        max_squares = min(self.max_soft_tokens, max_patches // self.merge_size**2)
        side = self.patch_size * self.merge_size
        factor = math.sqrt(max_squares * side**2 / (height * width))
        rows, columns = (math.floor(factor * each / side) for each in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, max_squares)
        elif columns == 0:
            rows, columns = min(height // width, max_squares), 1
        if not 0 < rows * columns <= max_squares:
            raise InvalidRequestError(
                f"an image of {width} x {height} pixels is too long for its width, so this model"
                " cannot see it"
            )
        return rows * side, columns * side
