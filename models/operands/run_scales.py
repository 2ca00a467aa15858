"""Order of the scales of experts in 4 bits, in which kernels read those of a tile at once.

A matrix [N, K] has an entry for each group of columns of a row: MXFP4 a byte for 32 columns, NVFP4
a bfloat16 for 16, integers a word for 32, 64 or 128. In tile order they are
[2 * ceil(K / 256), N, entries]: those of 128 columns of a row side by side, zeros past the end.
Where two matrices are stacked, gate and up, eight rows of each take turns, as in the tiles of their
products.
"""

import torch
from torch.nn import functional

from models.number_formats import MXFP4_RUN

COLUMNS = 128
"""Columns of a row whose entries are side by side."""
RUNS = COLUMNS // MXFP4_RUN
"""Entries of MXFP4 for them, which make one word."""
OCTET = 8
"""Rows of one matrix before those of the other."""


def num_words(num_columns: int) -> int:
    """Returns how many times 128 columns a row has in tile order."""
    return 2 * -(-num_columns // (2 * COLUMNS))


def tiled_shape(num_rows: int, num_columns: int, group: int = MXFP4_RUN) -> tuple[int, int, int]:
    """Returns the shape in tile order of the entries of a matrix, or of stacked ones."""
    return num_words(num_columns), num_rows, COLUMNS // group


def fill_tiled(tiled: torch.Tensor, entries: torch.Tensor, part: int, num_parts: int) -> None:
    """Copies the entries of one of num_parts stacked matrices into tile order.

    tiled: as tiled_shape has it, maybe of stacked experts; it has num_parts * N rows.
    entries: [..., N, K / group]; N is a multiple of 8.
    """
    *stacked, count, num_rows, each = tiled.shape
    padded = functional.pad(entries, (0, count * each - entries.shape[-1]))
    words = padded.reshape(*stacked, num_rows // num_parts, count, each).movedim(-2, -3)
    octets = tiled.view(*stacked, count, -1, num_parts, OCTET, each)
    octets.select(-3, part).copy_(words.reshape(*stacked, count, -1, OCTET, each))


def by_row(tiled: torch.Tensor, num_columns: int, num_parts: int) -> torch.Tensor:
    """Returns entries of tile order as rows, [..., N, K / group]."""
    *stacked, count, num_rows, each = tiled.shape
    octets = tiled.view(*stacked, count, -1, num_parts, OCTET, each).transpose(-3, -4)
    words = octets.reshape(*stacked, count, num_rows, each).movedim(-3, -2)
    return words.flatten(-2)[..., : num_columns * each // COLUMNS]


def integer_words(scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Returns the entries of integers, int32: scales in the lower half, zero points in the upper.

    A zero point z is there as the bfloat16 128 + z, whose last bits it is.

    scale: bfloat16. zero: of the same shape, uint8 below 16; None means 8 everywhere.
    """
    upper = (torch.full_like(scale, 8, dtype=torch.int32) if zero is None else zero.int()) | 0x4300
    return upper << 16 | scale.view(torch.int16).int() & 0xFFFF


def scales_and_zeros(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales, bfloat16, and zero points, uint8, of the entries of integers."""
    return words.to(torch.int16).view(torch.bfloat16), (words >> 16 & 0xF).to(torch.uint8)


def entry_group(group: int) -> int:
    """Returns the columns of an entry for integers that have a scale for `group` columns."""
    return next(each for each in (COLUMNS, COLUMNS // 2, MXFP4_RUN) if group % each == 0)
