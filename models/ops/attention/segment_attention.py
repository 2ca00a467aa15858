"""Attention of patches to all patches of their segment: octavo::segment_attention."""

import torch
from torch.nn import functional

from models.kernels.gpu import has_kernels
from models.ops.custom_op import direct_register_custom_op


def _segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attends each row to the rows of its segment; returns [N, H * D].

    Segments follow each other, so that captured graphs and compiled code take any: they are
    content, not shapes.

    Args:
        q: [N, H, D].
        k: likewise.
        v: likewise.
        bounds: [N, 2] int32, contiguous: first row of each row's segment, and the one after it.
        scale: factor of the scores.
    """
    if has_kernels(q.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention import segment_attention as kernel

        return kernel.segment_attention(q, k, v, bounds, scale)
    spans = torch.unique_consecutive(bounds, dim=0).tolist()
    starts: dict[int, list[int]] = {}
    for start, end in spans:
        starts.setdefault(end - start, []).append(start)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Segments of one length are computed in one call.
    for length, firsts in starts.items():
        index = torch.tensor(firsts, device=q.device).unsqueeze(1) + torch.arange(
            length, device=q.device
        )
        own_q, own_k, own_v = (each[index].transpose(1, 2) for each in (q, k, v))
        attended = functional.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)
        output[index] = attended.transpose(1, 2)
    return output.flatten(1)


def _fake_segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    del k, v, bounds, scale
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


segment_attention = direct_register_custom_op(
    "segment_attention", _segment_attention, (), _fake_segment_attention
)
