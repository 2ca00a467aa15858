"""Vectors of images in the residual stream: octavo::write_image_rows, octavo::add_image_rows.

The vectors come from the forward context. Both operators launch nothing in a pass without images.
"""

import torch

from models.forward_context import get_forward_context
from models.ops.custom_op import direct_register_custom_op


def _write_image_rows(hidden: torch.Tensor) -> None:
    """Replaces the hidden states, [T, H], of image tokens by their first H features."""
    chosen = _chosen_rows(hidden, 0)
    if chosen is not None:
        rows, is_image = chosen
        torch.where(is_image, rows, hidden, out=hidden)


def _add_image_rows(hidden: torch.Tensor, level: int) -> None:
    """Adds features level * H to (level + 1) * H of image tokens to hidden, [T, H].

    Source: Meng et al. 2024, "DeepStack".
    """
    chosen = _chosen_rows(hidden, level)
    if chosen is not None:
        rows, is_image = chosen
        torch.where(is_image, hidden + rows, hidden, out=hidden)


def _chosen_rows(hidden: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns each token's row, [T, H], of any content for text, and whether it has one, [T, 1].

    None without images.
    """
    metadata = get_forward_context().image_metadata
    if metadata is None or metadata.index is None:
        return None
    num_tokens, size = hidden.shape
    index = metadata.index[:num_tokens]
    features = metadata.rows[:, level * size : (level + 1) * size]
    return features.index_select(0, index.clamp(min=0)), (index >= 0).unsqueeze(1)


write_image_rows = direct_register_custom_op("write_image_rows", _write_image_rows, ("hidden",))
add_image_rows = direct_register_custom_op("add_image_rows", _add_image_rows, ("hidden",))
