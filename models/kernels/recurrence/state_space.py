"""The state-space rule of Mamba2."""

import torch
import triton

from models.forward_context import AttentionMetadata
from models.kernels.recurrence.decayed_state import DecayHeads, StepSizes, decayed_state
from models.state_cache import StateCacheData


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    *,
    num_groups: int,
    state_size: int,
    dt_limits: tuple[float, float],
) -> None:
    """Applies the rule to the state [H, P, N] of each request, which it updates in place.

    h <- e^(dt A) h + dt x B^T with A = -e^a_log; y = h C + d x. Launches may be captured. T tokens,
    H heads of P elements, G groups of heads that share B and C of N elements.

    Args:
        xbc: [T, H P + 2 G N], x, B and C; rows may be apart.
        dt: [T, H], before softplus and limits; rows may be apart.
        a_log: [H] float32.
        dt_bias: [H].
        d: [H].
        output: [T, H, P], contiguous, of xbc's dtype. Tokens of no request keep their content.
        cache: states, of each request that has computed tokens; those of requests without query
            tokens stay.
        metadata: of the step; block_tables name the pages of states.
        num_groups: G.
        state_size: N.
        dt_limits: least and largest dt.
    """
    num_heads, head_dim = output.shape[1:]
    size = num_groups * state_size
    x, b, c = xbc.split((num_heads * head_dim, size, size), dim=1)
    heads = DecayHeads(
        num_heads=num_heads,
        group=num_heads // num_groups,
        k_dim=state_size,
        v_dim=head_dim,
        block_k=triton.next_power_of_2(state_size),
        is_transposed=True,
        has_sizes=True,
    )
    sizes = StepSizes(dt=dt, dt_bias=dt_bias, d=d, limits=dt_limits)
    decayed_state(c, b, x, a_log, sizes, output, cache, metadata, heads, scale=1.0)
