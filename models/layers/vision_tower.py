"""An encoder of images: what the host works out of their grids, then a program of tensors alone."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.config_sections.vision import VisionConfig

NUM_COLOURS = 3
PADDING_SEGMENT = 64
"""Most rows of a segment of padding, which attends to itself: longer ones would take time."""


class TowerLayers(nn.ModuleList):
    """The layers of a tower, each of which compiled code may run in its place."""

    def __init__(
        self, layers: Sequence[nn.Module], *, hidden_size: int, rotation_size: int | None = None
    ) -> None:
        """Takes the layers, which run as they are written.

        Args:
            layers: each takes hidden states, a rotation if they have one, and bounds of segments.
            hidden_size: elements of a hidden state.
            rotation_size: elements of a rotated head; None without rotation.
        """
        super().__init__(layers)
        self._sizes = hidden_size, rotation_size
        self._dtype = torch.get_default_dtype()
        self._forwards: list[Callable[..., Any]] = list(layers)

    def run(self, number: int, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden] by one layer."""
        output: torch.Tensor = self._forwards[number](hidden, *others)
        return output

    def use(self, forwards: Sequence[Callable[..., Any]]) -> None:
        """Runs other code of all layers, such as compiled code."""
        self._forwards = list(forwards)

    @property
    def are_replaced(self) -> bool:
        """Whether other code runs than the layers themselves."""
        return self._forwards != list(self)

    def example_inputs(self, num_rows: int) -> list[torch.Tensor]:
        """Returns inputs of a layer with the kinds of real ones."""
        hidden_size, rotation_size = self._sizes
        device = next(self.parameters()).device
        inputs = [torch.zeros(num_rows, hidden_size, dtype=self._dtype, device=device)]
        if rotation_size is not None:
            inputs.append(torch.zeros(num_rows, 2, rotation_size, device=device))
        return [*inputs, torch.zeros(num_rows, 2, dtype=torch.int32, device=device)]


class VisionTower(nn.Module):
    """Maps patches of images to the vectors that replace their tokens.

    Every rank holds all of it. `lay_out` runs on the host. Shapes in `encode` depend on the number
    of patches alone, so a captured graph of it runs any images of as many or fewer. `arrange` picks
    the images' own vectors.
    """

    weights_mapping: ClassVar[dict[str, str]] = {}
    """Replacements of parts of the checkpoint's tensor names."""
    unused_parts: tuple[str, ...] = ()
    """Beginnings of names, after these replacements, of parts that are passed over."""
    layout_rows: ClassVar[tuple[str, ...]] = ()
    """The rows of the array that `lay_out` returns; see models.vision.patch_layout."""

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
        layout = torch.from_numpy(self.lay_out(grids)).to(patches.device)
        return self.arrange(self.encode(patches, layout), grids)

    def lay_out(self, grids: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
        """Returns what `encode` takes besides patches: [len(layout), N], N patches."""
        return np.empty((0, sum(map(self.config.num_patches, grids))), np.int32)

    def encode(self, patches: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
        """Encodes patches, with padding or without; no shape depends on the content of `layout`.

        Args:
            patches: [N, 3 * P * P] uint8; N is a multiple of the configuration's `patch_unit`.
            layout: [len(self.layout_rows), N] int32.

        Returns:
            [n', features] of the model's dtype; those of padding come last.
        """
        raise NotImplementedError

    def arrange(self, vectors: torch.Tensor, grids: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Maps the results of `encode` to the vectors of images, [n, features]."""
        return vectors[: sum(map(self.num_vectors, grids))]

    def pad(self, layout: NDArray[np.int32], num_patches: int) -> NDArray[np.int32]:
        """Appends padding to the result of `lay_out`: segments of its own, in images of 1 x 1."""
        first = layout.shape[1]
        rows = np.arange(first, num_patches, dtype=np.int32)
        starts = first + (rows - first) // PADDING_SEGMENT * PADDING_SEGMENT
        ends = np.minimum(starts + PADDING_SEGMENT, num_patches)
        kinds = {
            "row": np.zeros_like(rows),
            "column": np.zeros_like(rows),
            "height": np.ones_like(rows),
            "width": np.ones_like(rows),
            "start": starts,
            "end": ends,
            "source": rows,
            "square": rows // self.config.patch_unit,
        }
        added = [kinds[name.removeprefix("window_")] for name in self.layout_rows]
        padding = np.stack(added) if added else np.empty((0, len(rows)), np.int32)
        return np.concatenate([layout, padding], axis=1)

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
