"""The encoder of images as a program that graphs hold: padded patches in, vectors out."""

import numpy as np
import torch
from numpy.typing import NDArray

from models.config_sections.vision import VisionConfig
from models.forward_context import GraphKey
from models.layers.vision_tower import VisionTower
from services.engine.compilation.graphs.graph_runner import Implied
from services.engine.compilation.graphs.recorder import Inputs, Program
from services.engine.limits import StepLimits
from services.engine.worker.inputs.transfer import overwrite


def most_shared_patches(vision: VisionConfig, limits: StepLimits) -> int:
    """Returns the most patches of a step that encodes several images, at least one unit's."""
    grid = vision.largest_grid(limits.max_encoder_tokens)
    share = vision.num_patches(grid) / vision.num_vectors(grid)
    return max(vision.patch_unit, int(limits.max_encoder_tokens * share))


class EncoderProgram:
    """Encodes a number of patches; those after the images' own are padding.

    All graphs read the same memory, each its beginning.
    """

    implied: Implied | None = None

    def __init__(self, tower: VisionTower, max_patches: int, device: torch.device) -> None:
        """Allocates the inputs.

        Args:
            tower: the encoder, with the weights and the code that will run.
            max_patches: of the largest graph.
            device: of the tower.
        """
        self._tower = tower
        shape = max_patches, tower.config.patch_bytes
        self._patches = torch.zeros(shape, dtype=torch.uint8, device=device)
        num_rows = len(tower.layout_rows)
        self._layout = torch.zeros(num_rows * max_patches, dtype=torch.int32, device=device)

    def inputs(self, key: GraphKey) -> Inputs:
        """Returns the patches of a graph and their layout."""
        num_patches, num_rows = key.num_tokens, len(self._tower.layout_rows)
        layout = self._layout[: num_rows * num_patches].view(num_rows, num_patches)
        return {"patches": self._patches[:num_patches], "layout": layout}

    def program(self, key: GraphKey) -> Program:
        """Returns the encoder over a graph's patches."""
        inputs = self.inputs(key)
        return lambda: (self._tower.encode(inputs["patches"], inputs["layout"]),)

    def write(self, key: GraphKey, patches: NDArray[np.uint8], layout: NDArray[np.int32]) -> None:
        """Fills a graph's inputs.

        Args:
            key: of a graph with room for the patches.
            patches: [N, 3 * P * P]; the content of padding does not matter.
            layout: that of the tower for them.
        """
        inputs = self.inputs(key)
        overwrite(inputs["patches"][: len(patches)], patches)
        overwrite(inputs["layout"], self._tower.pad(layout, key.num_tokens))

    def write_dummy(self, key: GraphKey, variant: int) -> None:
        """Fills the inputs with noise of one large image, or with variant 1 of two smaller ones."""
        vision, count = self._tower.config, variant + 1
        grid = vision.largest_grid(max(1, key.num_tokens // vision.merge**2 // count))
        num_images = min(count, key.num_tokens // vision.num_patches(grid))
        # In padding too: a test fills the inputs twice with the same.
        noise = np.random.default_rng(variant).bytes(key.num_tokens * vision.patch_bytes)
        patches = np.frombuffer(noise, np.uint8).reshape(-1, vision.patch_bytes)
        self.write(key, patches, self._tower.lay_out([grid] * num_images))
