"""The place in a decoder where vectors of images enter the residual stream."""

import torch
from torch import nn

from models.ops.elementwise.image_rows import add_image_rows, write_image_rows


class ImageRows(nn.Module):
    """Puts the vectors of a level into the residual stream: replaces tokens' at 0, else adds.

    level: 0 for embeddings, l for the output of the l-th layer.
    """

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def forward(self, hidden: torch.Tensor) -> None:
        """Changes hidden, [T, hidden], in place."""
        if self.level == 0:
            write_image_rows(hidden)
        else:
            add_image_rows(hidden, self.level)
