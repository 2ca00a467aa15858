"""Kimi K2.5 to 2.7: never enlarged, and filled with black to whole windows."""

import math
from typing import Annotated

from PIL import Image
from pydantic import Field

from services.frontend.images.families.family import (
    Patches,
    Side,
    WindowFamily,
    patchify,
)


class Kimi(WindowFamily):
    """Settings of Kimi's image processor. A grid is (height, width) in patches."""

    max_own_patches: Annotated[int, Field(ge=1)]
    """Larger images shrink to about this number."""
    max_side_patches: Side
    """Longer sides shrink to this number."""

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Shrinks to the limits, fills up to whole windows and cuts window by window."""
        height, width = self.resized_size(image.height, image.width, max_patches=max_patches)
        window = self.patch_size * self.merge_size
        rows, columns = -(-height // window), -(-width // window)
        whole = Image.new("RGB", (columns * window, rows * window))
        whole.paste(self._resized(image, height, width))
        values = patchify(whole, self.patch_size, merge_size=self.merge_size)
        return Patches((rows * self.merge_size, columns * self.merge_size), values)

    def resized_size(self, height: int, width: int, *, max_patches: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to, before it is filled up.

        Source: `navit_resize` in transformers 5.24, image_processing_kimi_k25.py. Where the engine
        takes fewer patches, the number is that of whole windows.
        """
        patch, longest = self.patch_size, self.max_side_patches * self.patch_size
        num_own = max(1, height // patch) * max(1, width // patch)
        scale = min(
            1.0, math.sqrt(self.max_own_patches / num_own), longest / height, longest / width
        )
        window = patch * self.merge_size
        while True:
            sides = [min(max(1, int(side * scale)), longest) for side in (height, width)]
            num_windows = math.prod(-(-side // window) for side in sides)
            if num_windows * self.merge_size**2 <= max_patches or num_windows == 1:
                return sides[0], sides[1]
            scale *= 0.99
