"""Rotations by position in time, height and width: octavo::rotation_rows."""

import torch

from models.forward_context import get_forward_context
from models.ops.custom_op import operator


@operator(lambda table, positions, **_: table.new_empty((*positions.shape, *table.shape[1:])))
def rotation_rows(table: torch.Tensor, positions: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """Looks up each token's rotation, [T, 1, N], column by column at the position on its axis.

    Positions in time, height and width come from the forward context; without images they are all
    the position in the sequence.

    table: [P, 1, N], rotations at each position.
    positions: [T] int64, in the sequence.
    axes: [N] int64, which of the three positions a column takes.

    Source: Wang et al. 2024, "Qwen2-VL", section 2.1 (M-RoPE).
    """
    metadata = get_forward_context().image_metadata
    if metadata is None or metadata.rope_positions is None:
        return table.index_select(0, positions)
    each = metadata.rope_positions[:, : positions.shape[0]].index_select(0, axes)
    return table.squeeze(1).gather(0, each.t()).unsqueeze(1)
