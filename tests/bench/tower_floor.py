"""The least time that an encoder of images can take: its products, or its weights read once.

Products are taken at 790 TFLOP/s and reads at 4,300 GB/s, as measured on an H200 in bfloat16.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from models.layers.vision_tower import TowerLayers, VisionTower

FLOP_PER_MS = 790e9
BYTES_PER_MS = 4300e6


class TowerFloor(NamedTuple):
    """Milliseconds of each kind of work, at least."""

    products_ms: float
    attention_ms: float
    reads_ms: float

    @property
    def whole_ms(self) -> float:
        """Milliseconds of all work together."""
        return max(self.products_ms + self.attention_ms, self.reads_ms)


def tower_floor(tower: VisionTower, grids: Sequence[tuple[int, ...]]) -> TowerFloor:
    """Returns the floor of encoding images together, each attending to itself in all layers.

    Patches are embedded and go through all layers; what comes after runs for each vector.
    """
    vision = tower.config
    num_patches = [vision.num_patches(grid) for grid in grids]
    num_vectors = sum(map(tower.num_vectors, grids))
    of_layers = sum(
        weight.numel()
        for layers in tower.modules()
        if isinstance(layers, TowerLayers)
        for weight in layers.parameters()
        if weight.dim() > 1
    )
    of_patches = sum(
        each.weight.numel() for each in tower.modules() if isinstance(each, nn.Conv2d | nn.Conv3d)
    )
    tables = sum(each.weight.numel() for each in tower.modules() if isinstance(each, nn.Embedding))
    products = sum(weight.numel() for weight in tower.parameters() if weight.dim() > 1)
    of_vectors = products - of_layers - of_patches - tables
    flop = 2 * sum(num_patches) * (of_layers + of_patches) + 2 * num_vectors * of_vectors
    pairs = sum(count**2 for count in num_patches)
    attention = 4 * pairs * vision.hidden_size * vision.num_layers
    num_bytes = sum(weight.nbytes for weight in tower.parameters())
    return TowerFloor(flop / FLOP_PER_MS, attention / FLOP_PER_MS, num_bytes / BYTES_PER_MS)


def tower_floor_ms(tower: VisionTower, grids: Sequence[tuple[int, ...]]) -> float:
    """Returns the floor of encoding images together; see `tower_floor`."""
    return tower_floor(tower, grids).whole_ms
