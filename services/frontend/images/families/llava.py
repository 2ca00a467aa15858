"""LLaVA 1.5: the square in the middle of an image."""

from PIL import Image

from services.frontend.images.families.family import Family, Grid, Patches, Side, patchify, product


class Llava(Family):
    """Settings of transformers' CLIPImageProcessor. A grid is (1, height, width) in patches."""

    side: Side
    """Pixels of a side of the square."""

    @property
    def min_patches(self) -> int:
        """Patches of any image."""
        return (self.side // self.patch_size) ** 2

    def patches(self, image: Image.Image, *, max_patches: int, is_only_image: bool) -> Patches:
        """Resizes the shorter side, cuts the middle of the longer one, and cuts row by row."""
        shorter = min(image.size)
        height, width = (int(self.side * each / shorter) for each in (image.height, image.width))
        resized = self._resized(image, height, width)
        top, left = (height - self.side) // 2, (width - self.side) // 2
        square = resized.crop((left, top, left + self.side, top + self.side))
        rows = self.side // self.patch_size
        return Patches((1, rows, rows), patchify(square, self.patch_size))

    def num_patches(self, grid: Grid) -> int:
        """Returns height times width."""
        total = product(grid, 3, num_factors=3)
        rows = self.side // self.patch_size
        if grid != (1, rows, rows):
            raise ValueError(f"a grid {grid} of an image that has {rows} x {rows} patches")
        return total

    def token_ids(self, grid: Grid, image_token_id: int) -> tuple[int, ...]:
        """Returns one image token for each patch."""
        return (image_token_id,) * self.num_patches(grid)
