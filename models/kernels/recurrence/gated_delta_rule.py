"""The gated delta rule: chooses the kernels.

In batch-invariant mode, and in 32 bits, every token is computed after the one before it; otherwise
only those of requests with few query tokens are.
"""

from dataclasses import replace

import torch

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionMetadata
from models.kernels.recurrence.chunks import MOST_STEP
from models.kernels.recurrence.gated_delta_chunks import gated_delta_chunks
from models.kernels.recurrence.gated_delta_step import delta_heads, gated_delta_step
from models.kernels.recurrence.moved_states import move_to_end
from models.state_cache import StateCacheData


def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    *,
    num_k_heads: int,
    head_k_dim: int,
    beta_scale: float = 1.0,
    decay_floor: float = 0.0,
) -> None:
    """Applies the rule to the state [H, Dk, Dv] of each request, which it updates in place.

    Launches may be captured. T tokens, Hk heads of queries and keys, H of values.

    Args:
        qkv: [T, 2 Hk Dk + H Dv], queries, keys and values; rows may be apart.
        a: gates [T, H], or [T, H, Dk]: each channel of k has a decay; rows may be apart.
        b: gates [T, H] of what is written; rows may be apart.
        a_log: [H] float32.
        dt_bias: float32, as many as gates `a` of a token.
        output: [T, H, Dv], contiguous, of qkv's dtype. Tokens of no request keep their content.
        cache: states, of each request that has computed tokens; those of requests without query
            tokens stay.
        metadata: of the step; block_tables name the pages of states.
        num_k_heads: Hk; head h of values has the keys of head h // (H // Hk).
        head_k_dim: Dk.
        beta_scale: factor of sigmoid(b).
        decay_floor: least logarithm of a decay, which is then decay_floor * sigmoid(e^a_log (a +
            dt_bias)); 0: it is -e^a_log softplus(a + dt_bias).
    """
    heads = delta_heads(
        a, output, num_k_heads, head_k_dim, beta_scale=beta_scale, decay_floor=decay_floor
    )
    arguments = (qkv, a, b, a_log, dt_bias, output, cache, metadata, heads)
    has_chunks = metadata.max_seqlen_q > MOST_STEP and qkv.itemsize == 2
    if not has_chunks or is_batch_invariant():
        gated_delta_step(*arguments, most_tokens=len(qkv))
        return
    if len(metadata.seq_lens) > 1:
        gated_delta_step(*arguments, most_tokens=MOST_STEP)
    in_place = move_to_end(cache, metadata, least_tokens=MOST_STEP + 1)
    cache = replace(cache, num_slots=1)
    gated_delta_chunks(qkv, a, b, a_log, dt_bias, output, cache, in_place, heads)
