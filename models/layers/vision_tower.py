"""An encoder of images, as engines run it: eagerly, between steps of the text's layers."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from models.config_sections.vision import VisionConfig

NUM_COLOURS = 3


class VisionTower(nn.Module):
    """Maps patches of images to the vectors that replace their tokens.

    Every rank holds all of it.
    """

    weights_mapping: ClassVar[dict[str, str]] = {}
    """Replacements of parts of the checkpoint's tensor names."""
    unused_parts: tuple[str, ...] = ()
    """Beginnings of names, after these replacements, of parts that are passed over."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self._dtype = torch.get_default_dtype()
        colours = config.colours
        for name, values in (("mean", colours.mean), ("std", colours.std)):
            of_colour = torch.tensor(values, dtype=torch.float32)
            pixels = of_colour.repeat_interleave(config.patch_size**2)
            self.register_buffer(name, pixels, persistent=False)
        self.mean: torch.Tensor
        self.std: torch.Tensor

    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Encodes images.

        Args:
            patches: [N, 3 * P * P] uint8, all images' patches, one image after the other, colour
                by colour; the order within an image is the family's.
            grids: of each image, patches in height and width, and what else the family needs.

        Returns:
            [n, features] of the model's dtype, image after image.
        """
        raise NotImplementedError

    def num_vectors(self, grid: tuple[int, ...]) -> int:
        """Returns how many vectors an image becomes."""
        return self.config.num_vectors(grid)

    def renamed(self, name: str) -> str:
        """Returns a stored tensor's name, without the model's prefix, in this module."""
        for stored, ours in self.weights_mapping.items():
            name = name.replace(stored, ours)
        return name

    def scaled(self, patches: torch.Tensor) -> torch.Tensor:
        """Returns patches, [N, 3 * P * P] uint8, with scaled colours of the model's dtype."""
        values = patches.to(torch.float32) * self.config.colours.factor
        return ((values - self.mean) / self.std).to(self._dtype)
