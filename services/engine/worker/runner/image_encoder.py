"""Encodes the images that steps order."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from models.layers.vision_tower import VisionTower
from services.engine.batch import EncodedImage, pack_int32
from services.engine.config.images import PAGE_VECTORS
from services.engine.limits import StepLimits
from services.engine.worker.inputs.checks import require
from services.engine.worker.inputs.image_inputs import ImageInputs
from services.engine.worker.inputs.transfer import to_device


class ImageEncoder:
    """Runs the encoder, eagerly and before the forward pass of a step."""

    def __init__(self, tower: VisionTower, inputs: ImageInputs, limits: StepLimits) -> None:
        self._tower = tower
        self._inputs = inputs
        self._limits = limits

    def encode(self, images: Sequence[EncodedImage]) -> None:
        """Writes the vectors of images into the table.

        Raises:
            ValueError: an image has other patches than its grid says, or too few pages.
        """
        if not images:
            return
        tower, device = self._tower, self._inputs.rows.device
        grids = [tuple(each.grid) for each in images]
        # A bytearray, as torch warns of memory that it may not write.
        patches = np.frombuffer(bytearray().join(each.patches for each in images), np.uint8)
        counts = [tower.num_vectors(grid) for grid in grids]
        vectors = tower(to_device(patches.reshape(-1, tower.config.patch_bytes), device), grids)
        require(len(vectors) == sum(counts), "an image whose vectors are not those of its grid")
        for image, part in zip(images, vectors.split(counts), strict=True):
            self._write(image, part)

    def _write(self, image: EncodedImage, vectors: Tensor) -> None:
        self._inputs.rows.index_copy_(0, self._inputs.slots(image, len(vectors)), vectors)

    def encode_largest(self) -> None:
        """Encodes as many vectors as any step does, to measure its memory."""
        vision, num_pages = self._tower.config, self._limits.num_encoder_pages
        grid = vision.largest_grid(num_pages * PAGE_VECTORS)
        patches = bytes(vision.num_patches(grid) * vision.patch_bytes)
        pages = pack_int32(range(num_pages))
        self.encode([EncodedImage(patches=patches, grid=grid, pages=pages)])
