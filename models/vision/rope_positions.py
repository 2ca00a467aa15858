"""Positions of tokens in time, height and width, for models with M-RoPE. On the host, once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def image_rope_positions(
    num_tokens: int, images: Sequence[tuple[int, int, tuple[int, int]]]
) -> tuple[NDArray[np.int64], int]:
    """Returns the positions of a prompt's tokens, and what is added to those of later ones.

    Text counts on in all three. Vectors of an image have one position in time, and their row and
    column from there; what follows begins after the larger side.

    Args:
        num_tokens: of the prompt.
        images: of each, in order: offset of its first token, its tokens, and their rows and
            columns.

    Returns:
        Positions, [3, num_tokens]; and delta: a later token p has the position p + delta.

    Source: Wang et al. 2024, "Qwen2-VL", section 2.1; transformers 5.24, get_rope_index.
    """
    positions = np.empty((3, num_tokens), np.int64)
    end, start = 0, 0
    for offset, length, (rows, columns) in images:
        text = offset - end
        positions[:, end:offset] = np.arange(start, start + text)
        start += text
        if length != rows * columns:
            raise ValueError(f"an image of {rows} x {columns} vectors has {length} tokens")
        end = offset + length
        positions[0, offset:end] = start
        positions[1, offset:end] = start + np.repeat(np.arange(rows), columns)
        positions[2, offset:end] = start + np.tile(np.arange(columns), rows)
        start += max(rows, columns)
    positions[:, end:] = np.arange(start, start + num_tokens - end)
    return positions, start + num_tokens - end - num_tokens
