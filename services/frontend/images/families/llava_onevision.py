"""LLaVA-OneVision and LLaVA-NeXT: the whole image as one tile, and tiles of one resolution."""

import math
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import Field

from services.frontend.images.families.family import Family, Grid, Patches, Side, patchify, product


class LlavaOnevision(Family):
    """Settings of transformers' LlavaOnevisionImageProcessor and its processor.

    A grid is (tiles, height, width, original height, original width): the whole image first, then
    tiles in rows; patches of a tile; the image's pixels. An image has one tile,
    padded to a square, where its prompt has several or more tiles would be too many patches.
    """

    tile_height: Side
    tile_width: Side
    """Pixels of a tile."""
    image_grid_pinpoints: Annotated[tuple[tuple[Side, Side], ...], Field(min_length=1)]
    """Heights and widths that tiles can cover, in whole tiles."""
    max_anyres_tiles: Annotated[int, Field(ge=1, le=256)]
    """Features of more tiles than these shrink to them: 9 of "anyres_max_9"."""

    @property
    def min_patches(self) -> int:
        """Patches of one tile."""
        return self._rows * self._columns

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Cuts tiles and each tile into patches; one tile where more have too many patches."""
        num_tiles = 1 + self._num_tiles(image.height, image.width)
        if is_only_image and num_tiles * self.min_patches <= max_patches:
            tiles = [self._resized(image, self.tile_height, self.tile_width), *self._tiles(image)]
        else:
            tiles = [self._resized(self._squared(image), self.tile_height, self.tile_width)]
        values = np.concatenate([patchify(tile, self.patch_size) for tile in tiles])
        grid = (len(tiles), self._rows, self._columns, image.height, image.width)
        return Patches(grid, values)

    def num_patches(self, grid: Grid) -> int:
        """Returns tiles times height times width."""
        total = product(grid, 5, num_factors=3)
        if grid[1:3] != (self._rows, self._columns):
            raise ValueError(f"a grid {grid} of other tiles than {self._rows} x {self._columns}")
        num_tiles = self._num_tiles(*grid[3:])
        if grid[0] not in (1, 1 + num_tiles):
            raise ValueError(f"a grid {grid} without {num_tiles} tiles")
        return total

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each feature; each row of features ends with a newline's.

        Source: `_get_number_of_features` in transformers 5.24, processing_llava_onevision.py.
        """
        num_tiles, tile_rows, tile_columns, height, width = grid
        num_base = tile_rows * tile_columns
        if num_tiles == 1:
            return (image_token_id,) * (num_base + 1)
        best_height, best_width = self.best_resolution(height, width)
        rows = tile_rows * (best_height // self.tile_height)
        columns = tile_columns * (best_width // self.tile_width)
        # Features of the padding around the image are left out.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.max_anyres_tiles * tile_rows**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return (image_token_id,) * (num_base + rows * (columns + 1))

    def best_resolution(self, height: int, width: int) -> tuple[int, int]:
        """Returns the resolution that keeps most of an image's pixels, and wastes least.

        Source: `select_best_resolution` in transformers 5.24, image_processing_utils.py.
        """

        def rank(resolution: tuple[int, int]) -> tuple[int, int]:
            to_height, to_width = resolution
            scale = min(to_width / width, to_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - to_height * to_width

        return max(self.image_grid_pinpoints, key=rank)

    def _tiles(self, image: Image.Image) -> list[Image.Image]:
        """Returns the tiles of an image that is centred on its best resolution."""
        to_height, to_width = self.best_resolution(image.height, image.width)
        scale_height, scale_width = to_height / image.height, to_width / image.width
        if scale_width < scale_height:
            height, width = min(math.ceil(image.height * scale_width), to_height), to_width
        else:
            height, width = to_height, min(math.ceil(image.width * scale_height), to_width)
        canvas = Image.new("RGB", (to_width, to_height))
        centre = ((to_width - width) // 2, (to_height - height) // 2)
        canvas.paste(self._resized(image, height, width), centre)
        return [
            canvas.crop((left, top, left + self.tile_width, top + self.tile_height))
            for top in range(0, to_height, self.tile_height)
            for left in range(0, to_width, self.tile_width)
        ]

    def _squared(self, image: Image.Image) -> Image.Image:
        """Returns an image with borders of the mean colour that make it square."""
        side = max(image.size)
        colour = tuple(int(mean * 255) for mean in self.image_mean)
        square = Image.new("RGB", (side, side), colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def _num_tiles(self, height: int, width: int) -> int:
        """Returns the number of tiles of an image's best resolution."""
        to_height, to_width = self.best_resolution(height, width)
        return to_height // self.tile_height * (to_width // self.tile_width)

    @property
    def _rows(self) -> int:
        return self.tile_height // self.patch_size

    @property
    def _columns(self) -> int:
        return self.tile_width // self.patch_size


class LlavaNext(LlavaOnevision):
    """Settings of transformers' LlavaNextImageProcessor: images have tiles among others, too."""

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Cuts tiles and each tile into patches; one tile where more have too many patches."""
        return LlavaOnevision.patches(self, image, max_patches=max_patches, is_only_image=True)
