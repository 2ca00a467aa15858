"""Mixer of Gated DeltaNet and Kimi Delta Attention: octavo::gated_delta_net.

The operator has no output, like attention: see models.ops.attention.attention.
"""

import torch
from torch.nn import functional

from models.forward_context import AttentionMetadata, get_forward_context
from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator
from models.ops.recurrence.causal_conv import causal_conv
from models.ops.recurrence.gated_delta_rule import delta_chunk, delta_step
from models.ops.recurrence.request_runs import request_runs
from models.ops.recurrence.scan import scan
from models.state_cache import StateCacheData

NORM_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


@operator(mutates=("output",))
def gated_delta_net(  # noqa: PLR0913  # an operator takes no dataclasses
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    output: torch.Tensor,
    layer_index: int,
    num_k_heads: int,
    head_k_dim: int,
    beta_scale: float = 1.0,
    decay_floor: float | None = None,
) -> None:
    """Convolves queries, keys and values, then applies the gated delta rule to each state.

    Metadata and states come from the forward context. Padding tokens get undefined outputs.
    T tokens, Hk heads of queries and keys, H of values, W width of the convolution.

    qkv: [T, 2 * Hk * K + H * V]: queries, keys and values; rows may be apart.
    a: [T, H], or [T, H, K] where each channel of a key has a decay. b: [T, H].
    conv_weight: [channels of qkv, W]; a silu follows.
    a_log: [H] float32. dt_bias: float32, as many as elements of a token's a.
    output: [T, H, V], contiguous.
    layer_index: of the cache entry.
    beta_scale: factor of sigmoid(b); 2 allows negative eigenvalues.
    decay_floor: makes the logarithm of a decay decay_floor * sigmoid(e^a_log (a + dt_bias)); None:
        it is -e^a_log softplus(a + dt_bias).

    Source: see models.ops.recurrence.gated_delta_rule.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, StateCacheData), f"entry {layer_index} keeps no state"
    if has_kernels(qkv.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.recurrence import (
            causal_conv as conv_kernel,
        )
        from models.kernels.recurrence import gated_delta_rule as kernel

        mixed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        conv_kernel.causal_conv(qkv, conv_weight, None, mixed, cache, metadata, activates=True)
        kernel.gated_delta_rule(
            mixed, a, b, a_log, dt_bias, output, cache, metadata,
            num_k_heads=num_k_heads, head_k_dim=head_k_dim, beta_scale=beta_scale,
            decay_floor=decay_floor or 0.0,
        )  # fmt: skip
        return
    _reference(qkv, a, b, conv_weight, a_log, dt_bias, output, cache, metadata,
               num_k_heads, head_k_dim, beta_scale, decay_floor)  # fmt: skip


def _reference(  # noqa: PLR0913  # see the operator
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    num_k_heads: int,
    head_k_dim: int,
    beta_scale: float,
    decay_floor: float | None,
) -> None:
    """Computes the operator in PyTorch."""
    num_heads, head_v_dim = output.shape[1:]
    sizes = [num_k_heads * head_k_dim] * 2 + [num_heads * head_v_dim]
    gates = a.unsqueeze(-1) if a.dim() == 2 else a
    for run in request_runs(metadata):
        mixed = causal_conv(qkv, conv_weight, None, cache, run, activates=True)
        # Kernels read what the convolution rounded.
        q, k, v = torch.split(mixed.to(qkv.dtype).float(), sizes, dim=-1)
        q, k = (
            _unit(x.view(*run.tokens.shape, num_k_heads, head_k_dim)).repeat_interleave(
                num_heads // num_k_heads, dim=2
            )
            for x in (q, k)
        )
        decay = gates[run.tokens].float() + dt_bias.view(num_heads, -1)
        rates = a_log.exp().view(num_heads, 1)
        if decay_floor is None:
            decay = -rates * functional.softplus(decay)
        else:
            decay = decay_floor * (rates * decay).sigmoid()
        beta = beta_scale * b[run.tokens].float().sigmoid().unsqueeze(-1)
        inputs = (
            q * head_k_dim**-0.5, k, v.view(*run.tokens.shape, num_heads, head_v_dim), decay, beta,
        )  # fmt: skip
        result = scan(inputs, cache, run, step=delta_step, chunk=delta_chunk)
        output[run.tokens] = result.to(output.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Returns vectors of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
