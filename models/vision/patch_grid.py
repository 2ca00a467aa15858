"""Where the patches of an image are, and learned positions resized to its grid."""

from collections.abc import Sequence

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


def window_order(height: int, width: int, side: int, device: torch.device) -> torch.Tensor:
    """Returns rows and columns, [2, height * width] int64, of patches ordered by windows.

    Windows of side x side patches come row by row, and so do the patches in each.
    """
    rows = torch.arange(height, device=device).unsqueeze(1).expand(height, width)
    columns = torch.arange(width, device=device).expand(height, width)
    windows = (height // side, side, width // side, side)
    return torch.stack(
        [each.reshape(windows).transpose(1, 2).flatten() for each in (rows, columns)]
    )


def interpolated(
    table: nn.Embedding, coordinates: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Returns learned positions of a square grid at the patches of another grid, [N, hidden].

    Corners fall on corners; between them it is bilinear, in float32.

    Args:
        table: positions of a square grid, row by row.
        coordinates: [2, N], each patch's row and column.
        height: of the image, in patches.
        width: likewise.
    """
    side = int(table.num_embeddings**0.5)
    taps, weights = [], []
    for coordinate, size in zip(coordinates, (height, width), strict=True):
        source = coordinate.to(torch.float32) * (side - 1) / max(size - 1, 1)
        first = source.floor()
        after = source - first
        taps.append(torch.stack((first, (first + 1).clamp(max=side - 1)), dim=1).long())
        weights.append(torch.stack((1 - after, after), dim=1))
    index = (taps[0].unsqueeze(2) * side + taps[1].unsqueeze(1)).flatten(1)
    weight = (weights[0].unsqueeze(2) * weights[1].unsqueeze(1)).flatten(1)
    resized: torch.Tensor = (table(index) * weight.unsqueeze(2)).sum(1)
    return resized.to(table.weight.dtype)


def unit_windows(
    grids: Sequence[tuple[int, int]], side: int, device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """Orders the units of images by windows of side x side; those at the ends may be smaller.

    Args:
        grids: height and width of each image, in units.
        side: of a window, in units.
        device: of the order.

    Returns:
        The number of each unit in this order, [units] int64; and the units of each window.
    """
    orders, lengths, first = [], [], 0
    for height, width in grids:
        of_row = torch.arange(height, device=device).unsqueeze(1) // side
        windows_in_row = -(-width // side)
        window = of_row * windows_in_row + torch.arange(width, device=device) // side
        orders.append(first + window.flatten().argsort(stable=True))
        heights, widths = (
            [min(side, size - start) for start in range(0, size, side)] for size in (height, width)
        )
        lengths += [rows * columns for rows in heights for columns in widths]
        first += height * width
    return torch.cat(orders), lengths
