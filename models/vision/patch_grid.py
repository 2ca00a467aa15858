"""Where the patches of an image are, and learned positions resized to its grid."""

import torch
from torch import nn


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
