"""Order in memory of the scales of MXFP4 experts, in which kernels read those of a tile at once.

A matrix [N, K] has scales [N, K / 32], one byte for each run of 32 columns. In tile order they are
[2 * ceil(K / 256), N, 4]: a word for 128 columns of a row, zeros past the end. Where two matrices
are stacked, gate and up, eight rows of each take turns, as in the tiles of their products.
"""

import torch
from torch.nn import functional

from models.number_formats import MXFP4_RUN

RUNS = 4
"""Runs of a row whose scales are in one word."""
OCTET = 8
"""Rows of one matrix before those of the other."""


def num_words(num_columns: int) -> int:
    """Returns the words of a row in tile order."""
    return 2 * -(-num_columns // (2 * MXFP4_RUN * RUNS))


def tiled_shape(num_rows: int, num_columns: int) -> tuple[int, int, int]:
    """Returns the shape in tile order of the scales of a matrix, or of stacked ones."""
    return num_words(num_columns), num_rows, RUNS


def fill_tiled(tiled: torch.Tensor, scale: torch.Tensor, part: int, num_parts: int) -> None:
    """Copies the scales of one of num_parts stacked matrices into tile order.

    tiled: [..., 2 * ceil(K / 256), num_parts * N, 4].
    scale: [..., N, K / 32]; N is a multiple of 8.
    """
    *stacked, count, num_rows, _ = tiled.shape
    padded = functional.pad(scale, (0, count * RUNS - scale.shape[-1]))
    words = padded.reshape(*stacked, num_rows // num_parts, count, RUNS).movedim(-2, -3)
    octets = tiled.view(*stacked, count, -1, num_parts, OCTET, RUNS)
    octets.select(-3, part).copy_(words.reshape(*stacked, count, -1, OCTET, RUNS))


def by_row(tiled: torch.Tensor, num_columns: int, num_parts: int) -> torch.Tensor:
    """Returns scales of tile order as rows, [..., N, K / 32]."""
    *stacked, count, num_rows, _ = tiled.shape
    octets = tiled.view(*stacked, count, -1, num_parts, OCTET, RUNS).transpose(-3, -4)
    words = octets.reshape(*stacked, count, num_rows, RUNS).movedim(-3, -2)
    return words.flatten(-2)[..., : num_columns // MXFP4_RUN]
