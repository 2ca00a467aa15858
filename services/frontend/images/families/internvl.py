"""InternVL: tiles of one size in the arrangement nearest to the image's shape, and a thumbnail."""

from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field

from services.frontend.images.families.family import (
    Family,
    Grid,
    Patches,
    Side,
    TokenId,
    patchify,
    product,
)

NumTiles = Annotated[int, Field(ge=1, le=256)]


class InternVL(Family):
    """Settings of transformers' GotOcr2ImageProcessor and InternVLProcessor.

    A grid is (tiles, height, width): tiles in rows, the thumbnail last, and patches of a tile.
    """

    tile_height: Side
    tile_width: Side
    """Pixels of a tile."""
    min_tiles: NumTiles
    max_tiles: NumTiles
    """Tiles without the thumbnail; images become one tile if the maximum is 1."""
    image_seq_length: Annotated[int, Field(ge=1, le=2**16)]
    """Tokens of a tile."""
    start_token_id: TokenId
    end_token_id: TokenId
    """Enclose an image's tokens."""

    @property
    def min_patches(self) -> int:
        """Patches of one tile."""
        return self._rows * self._columns

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Cuts tiles, row by row, and each tile into patches."""
        columns, rows = self.arrangement(image.height, image.width, max_patches=max_patches)
        canvas = self._resized(image, rows * self.tile_height, columns * self.tile_width)
        tiles = [
            canvas.crop((left, top, left + self.tile_width, top + self.tile_height))
            for top in range(0, canvas.height, self.tile_height)
            for left in range(0, canvas.width, self.tile_width)
        ]
        if len(tiles) > 1:
            tiles.append(self._resized(image, self.tile_height, self.tile_width))
        values = np.concatenate([patchify(tile, self.patch_size) for tile in tiles])
        return Patches((len(tiles), self._rows, self._columns), values)

    def num_patches(self, grid: Grid) -> int:
        """Returns tiles times height times width."""
        total = product(grid, 3, num_factors=3)
        if grid[1:] != (self._rows, self._columns):
            raise ValueError(f"a grid {grid} of other tiles than {self._rows} x {self._columns}")
        return total

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns the image tokens of all tiles between a start and an end."""
        image = (image_token_id,) * (self.image_seq_length * grid[0])
        return (self.start_token_id, *image, self.end_token_id)

    def arrangement(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the columns and rows of tiles whose shape is nearest to an image's.

        Of equal ones, the larger wins unless it has over twice the image's area.
        Source: `get_optimal_tiled_canvas` in transformers 5.24, image_processing_pil_got_ocr2.py.
        """
        # One tile has no thumbnail.
        max_tiles = min(self.max_tiles, max(1, max_patches // self.min_patches - 1))
        if max_tiles == 1:
            return 1, 1
        min_tiles = min(self.min_tiles, max_tiles)
        sides = range(1, max_tiles + 1)
        arrangements = [
            (columns, rows)
            for columns in sides
            for rows in sides
            if min_tiles <= columns * rows <= max_tiles
        ]
        best, best_difference = (1, 1), float("inf")
        half_tile = 0.5 * self.tile_height * self.tile_width
        for columns, rows in sorted(arrangements, key=lambda sizes: sizes[0] * sizes[1]):
            difference = abs(width / height - columns / rows)
            is_filled = width * height > half_tile * columns * rows
            if difference < best_difference or (difference == best_difference and is_filled):
                best, best_difference = (columns, rows), difference
        return best

    @property
    def _rows(self) -> int:
        return self.tile_height // self.patch_size

    @property
    def _columns(self) -> int:
        return self.tile_width // self.patch_size
