"""Turns pictures into the patches and tokens that an engine takes."""

import hashlib
import struct
from dataclasses import dataclass

from PIL import Image

from services.frontend.errors import InvalidRequestError
from services.frontend.images.families.family import Grid, Patches
from services.frontend.images.settings import ImageSettingsError, parse_settings

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as an engine takes it."""

    digest: bytes
    """SHA-256 of settings, grid and patches: 32 bytes."""
    grid: Grid
    """Positions of the patches, as the family defines them."""
    patches: bytes | memoryview
    """uint8 [N, C * P * P] in C order."""
    tokens: tuple[int, ...]
    """Token ids that replace the image's one token in a prompt."""


class ImageProcessor:
    """One model's image processor: a pure function of an engine's settings."""

    def __init__(self, kind: str, settings: str, *, image_token_id: int, max_patches: int) -> None:
        """Takes the fields of GetModelInfo's `ImageProcessor`.

        Images that would have more than `max_patches` patches shrink to fewer.

        Raises:
            ImageSettingsError: the settings cannot be followed.
        """
        text = settings.encode()
        self._hashed_settings = _LENGTH.pack(len(text)) + text
        self._image_token_id = image_token_id
        self._family = parse_settings(kind, settings)
        if max_patches < self._family.min_patches:
            raise ImageSettingsError(
                f"an image has {self._family.min_patches} patches or more;"
                f" the engine takes {max_patches}"
            )
        self.max_patches = max_patches

    @property
    def max_patches_bytes(self) -> int:
        """Most bytes of an image's patches."""
        return self.max_patches * self._family.patch_bytes

    def process(
        self, image: Image.Image, *, is_only_image: bool = True, max_patches: int | None = None
    ) -> ProcessedImage:
        """Processes an RGB image; see `patches` and `assemble`."""
        patches = self.patches(image, is_only_image=is_only_image, max_patches=max_patches)
        return self.assemble(patches.grid, patches.values.tobytes())

    def patches(
        self, image: Image.Image, *, is_only_image: bool = True, max_patches: int | None = None
    ) -> Patches:
        """Resizes and cuts an RGB image.

        Args:
            image: the picture, upright.
            is_only_image: whether its prompt has no other image; LLaVA-OneVision shows several
                with less detail.
            max_patches: shrinks the image further; the engine's limit and the smallest image of
                the family bound it.

        Raises:
            InvalidRequestError: the model cannot see an image of this shape.
        """
        limit = self.max_patches if max_patches is None else min(max_patches, self.max_patches)
        limit = max(limit, self._family.min_patches)
        patches = self._family.patches(image, max_patches=limit, is_only_image=is_only_image)
        # Sides are at least a window long, so very long images can exceed the area they may have.
        if len(patches.values) > self.max_patches:
            raise InvalidRequestError(
                f"the image becomes {len(patches.values)} patches; the limit is {self.max_patches}"
            )
        return patches

    def assemble(self, grid: Grid, patches: bytes | memoryview) -> ProcessedImage:
        """Returns patches with their digest and tokens.

        Raises:
            ValueError: the grid is impossible or the patches are not as many as it says.
        """
        num_bytes = self._family.num_patches(grid) * self._family.patch_bytes
        if num_bytes != len(patches):
            raise ValueError(f"{len(patches)} bytes of patches instead of {num_bytes}")
        hashed = hashlib.sha256(self._hashed_settings)
        hashed.update(struct.pack(f"<{1 + len(grid)}I", len(grid), *grid))
        hashed.update(patches)
        tokens = self._family.token_ids(grid, self._image_token_id)
        return ProcessedImage(hashed.digest(), grid, patches, tokens)
