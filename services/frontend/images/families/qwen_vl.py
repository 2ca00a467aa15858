"""Qwen2-VL to Qwen3.5, GLM-4V and MiniMax M3: any size, windows that the encoder merges."""

import math
from typing import Annotated

from PIL import Image
from pydantic import Field

from services.frontend.errors import InvalidRequestError
from services.frontend.images.families.family import (
    Grid,
    Patches,
    TokenId,
    WindowFamily,
    patchify,
)

MAX_ASPECT_RATIO = 200
"""Limit of `smart_resize` in transformers."""


class QwenVL(WindowFamily):
    """Settings of transformers' Qwen2VLImageProcessor. A grid is (height, width) in patches."""

    temporal_patch_size: Annotated[int, Field(ge=1, le=16)]
    """Frames of a patch. One is sent; the encoder repeats it."""
    min_pixels: Annotated[int, Field(ge=1)]
    max_pixels: Annotated[int, Field(ge=1)]
    """Smaller and larger images are resized to these areas."""

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes to whole windows and cuts window by window."""
        height, width = self.resized_size(image.height, image.width, max_patches=max_patches)
        resized = self._resized(image, height, width)
        values = patchify(resized, self.patch_size, merge_size=self.merge_size)
        return Patches((height // self.patch_size, width // self.patch_size), values)

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to.

        Source: `smart_resize` in transformers 5.24, image_processing_pil_qwen2_vl.py.

        Raises:
            InvalidRequestError: the image is too long for its width.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InvalidRequestError(
                f"an image of {width} x {height} pixels is over {MAX_ASPECT_RATIO} times as long as"
                " wide, which this model cannot see"
            )
        factor = self.patch_size * self.merge_size
        min_pixels, max_pixels = self.min_pixels, max_patches * self.patch_size**2
        if max_pixels < self.max_pixels:
            # Sides of small images are rounded up, at most to twice their length.
            min_pixels = min(min_pixels, max_pixels // 4)
        else:
            max_pixels = self.max_pixels
        resized_height = round(height / factor) * factor
        resized_width = round(width / factor) * factor
        if resized_height * resized_width > max_pixels:
            beta = math.sqrt(height * width / max_pixels)
            resized_height = max(factor, math.floor(height / beta / factor) * factor)
            resized_width = max(factor, math.floor(width / beta / factor) * factor)
        elif resized_height * resized_width < min_pixels:
            beta = math.sqrt(min_pixels / (height * width))
            resized_height = math.ceil(height * beta / factor) * factor
            resized_width = math.ceil(width * beta / factor) * factor
        return resized_height, resized_width


class Glm4v(QwenVL):
    """Settings of transformers' Glm4vImageProcessor; areas are those of one frame."""

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to.

        Images that are less than a window high or wide are scaled to one before.
        Source: `smart_resize` in transformers 5.24, image_processing_pil_glm4v.py.
        """
        factor = self.patch_size * self.merge_size
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return QwenVL.resized_size(self, height, width, max_patches=max_patches)


class MiniMaxM3(QwenVL):
    """Settings of transformers' MiniMaxM3VLImageProcessor and MiniMaxM3VLProcessor."""

    start_token_id: TokenId
    end_token_id: TokenId
    """Enclose an image's tokens."""

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each window between a start and an end."""
        image = QwenVL.token_ids(self, grid, image_token_id)
        return (self.start_token_id, *image, self.end_token_id)


class HyV4(QwenVL):
    """Settings of transformers' HYV4VLImageProcessor: rows of patches, and tokens that end rows."""

    @property
    def min_patches(self) -> int:
        """Patches for which the limit of patches has room with the end of their row."""
        return 2 * self.merge_size**2

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes to whole windows and cuts row by row."""
        height, width = self.resized_size(image.height, image.width, max_patches=max_patches)
        values = patchify(self._resized(image, height, width), self.patch_size)
        return Patches((height // self.patch_size, width // self.patch_size), values)

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each window and each end of a row of windows."""
        rows = grid[0] // self.merge_size
        return (*QwenVL.token_ids(self, grid, image_token_id), *(image_token_id,) * rows)

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to.

        The engine's limit of patches bounds the tokens, a window's patches for each.
        """
        window, limit = self.patch_size * self.merge_size, max_patches
        while True:
            size = QwenVL.resized_size(self, height, width, max_patches=limit)
            tokens = size[0] // window * (size[1] // window + 1)
            if tokens * self.merge_size**2 <= max_patches or limit <= self.merge_size**2:
                return size
            limit = max(self.merge_size**2, limit * 9 // 10)
