"""Embeds patches, joins squares of them, and resizes learned positions to an image's grid."""

import torch
from torch import nn
from torch.nn import functional

from models.layers.vision_tower import NUM_COLOURS


class PatchEmbedding(nn.Module):
    """Projects patches; its weight is stored as that of a convolution."""

    def __init__(self, hidden_size: int, patch_size: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(NUM_COLOURS, hidden_size, patch_size, patch_size, bias=bias)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Maps [N, 3 * P * P] to [N, hidden]."""
        return functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


def merged_squares(hidden: torch.Tensor, height: int, width: int, side: int) -> torch.Tensor:
    """Joins squares of side x side patches of images of one size, whose patches come row by row.

    Maps [images * height * width, hidden] to [images * height * width / side^2, side^2, hidden].
    """
    squares = hidden.view(-1, height // side, side, width // side, side, hidden.shape[-1])
    return squares.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def interpolated(
    table: nn.Embedding, coordinates: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Returns learned positions of a square grid at the patches of other grids, [N, hidden].

    Corners fall on corners; between them it is bilinear, in float32.

    Args:
        table: positions of a square grid, row by row.
        coordinates: [2, N], each patch's row and column.
        sizes: [2, N], height and width of each patch's image, in patches.
    """
    side = int(table.num_embeddings**0.5)
    source = coordinates.to(torch.float32) * (side - 1) / (sizes - 1).clamp(min=1)
    return bilinear(table.weight, source)


def bilinear(table: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns learned positions between those of a square grid, [N, hidden], in float32.

    Args:
        table: [side^2, hidden], row by row.
        source: [2, N] float32, row and column in the grid, of 0 or more.
    """
    side = int(len(table) ** 0.5)
    first = source.floor()
    after = source - first
    taps = torch.stack((first, first + 1), dim=2).clamp(max=side - 1).long()
    weights = torch.stack((1 - after, after), dim=2)
    index = (taps[0].unsqueeze(2) * side + taps[1].unsqueeze(1)).flatten(1)
    weight = (weights[0].unsqueeze(2) * weights[1].unsqueeze(1)).flatten(1)
    resized: torch.Tensor = (functional.embedding(index, table) * weight.unsqueeze(2)).sum(1)
    return resized.to(table.dtype)


def bicubic(table: torch.Tensor, coordinates: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns learned positions at the patches of other grids, [N, hidden], in float32.

    Centres of patches fall between the centres of the table's.

    Args:
        table: [rows, columns, hidden].
        coordinates: [2, N], each patch's row and column.
        sizes: [2, N], height and width of each patch's image, in patches.
    """
    layout = ((coordinates.float() + 0.5) / sizes * 2 - 1).flip(0)
    found = functional.grid_sample(
        table.float().permute(2, 0, 1).unsqueeze(0),
        layout.t().view(1, -1, 1, 2),
        mode="bicubic",
        padding_mode="border",
        align_corners=False,
    )
    return found[0, :, :, 0].t().to(table.dtype)
