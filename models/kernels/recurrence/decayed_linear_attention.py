"""Linear attention whose state decays (lightning attention)."""

import torch
import triton

from models.forward_context import AttentionMetadata
from models.kernels.recurrence.decayed_state import DecayHeads, decayed_state
from models.state_cache import StateCacheData


def decayed_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> None:
    """Applies S <- e^-slope S + k v^T to the state [H, D, D] of each request, in place.

    o = scale q^T S. Launches may be captured. T tokens, H heads of D elements.

    Args:
        q: [T, H, D]; tokens may be apart.
        k: the same.
        v: the same.
        slopes: [H] float32.
        output: [T, H, D], contiguous, of q's dtype. Tokens of no request keep their content.
        cache: states, of each request that has computed tokens; those of requests without query
            tokens stay.
        metadata: of the step; block_tables name the pages of states.
        scale: of outputs.
    """
    heads = DecayHeads(
        num_heads=q.shape[1],
        group=1,
        k_dim=q.shape[2],
        v_dim=v.shape[2],
        block_k=triton.next_power_of_2(q.shape[2]),
        is_transposed=False,
        has_sizes=False,
    )
    decayed_state(q, k, v, slopes, None, output, cache, metadata, heads, scale=scale)
