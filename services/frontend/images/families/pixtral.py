"""Mistral3 and Ministral 3: any size up to a longest edge, rows that end with a break token."""

import math

from PIL import Image

from services.frontend.images.families.family import (
    Grid,
    Patches,
    Side,
    TokenId,
    WindowFamily,
    patchify,
)


class Pixtral(WindowFamily):
    """Settings of transformers' PixtralImageProcessor. A grid is (height, width) in patches."""

    max_height: Side
    max_width: Side
    """Larger images shrink to these, before sides are rounded up to whole windows."""
    break_token_id: TokenId
    """Ends a row of tokens."""
    end_token_id: TokenId
    """Ends the last row."""

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes to whole windows and cuts row by row."""
        height, width = self.resized_size(image.height, image.width, max_patches=max_patches)
        values = patchify(self._resized(image, height, width), self.patch_size)
        return Patches((height // self.patch_size, width // self.patch_size), values)

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns rows of image tokens with a break between them and an end after the last."""
        rows, columns = (side // self.merge_size for side in grid)
        row = (image_token_id,) * columns
        return (*((*row, self.break_token_id) * rows)[:-1], self.end_token_id)

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to.

        Source: `get_resize_output_image_size` in transformers 5.24's PIL processor of Pixtral. An
        image that is much longer than wide keeps at least one pixel here; there it fails.
        """
        side = math.isqrt(max_patches) // self.merge_size * self.merge_size * self.patch_size
        ratio = max(height / min(self.max_height, side), width / min(self.max_width, side))
        if ratio > 1:
            height = max(1, math.floor(height / ratio))
            width = max(1, math.floor(width / ratio))
        window = self.patch_size * self.merge_size
        return -(-height // window) * window, -(-width // window) * window
