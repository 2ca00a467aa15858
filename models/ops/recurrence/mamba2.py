"""Mixer of Mamba 2: octavo::mamba2.

The operator has no output, like attention: see models.ops.attention.attention.
"""

import torch
from torch.nn import functional

from models.forward_context import AttentionMetadata, get_forward_context
from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator
from models.ops.recurrence.causal_conv import causal_conv
from models.ops.recurrence.decayed_attention import decayed_chunk, decayed_step
from models.ops.recurrence.request_runs import request_runs
from models.ops.recurrence.scan import Rule, scan
from models.state_cache import StateCacheData


@operator(mutates=("output",))
def mamba2(  # noqa: PLR0913  # an operator takes no dataclasses
    xbc: torch.Tensor,
    dt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    output: torch.Tensor,
    layer_index: int,
    num_groups: int,
    state_size: int,
    dt_min: float,
    dt_max: float,
) -> None:
    """Convolves inputs, then maps them through the state space of each head.

    Metadata and states come from the forward context. Padding tokens get undefined outputs.
    T tokens, H heads of P elements, G groups of heads with N elements of the state each.

    xbc: [T, H * P + 2 * G * N]: inputs, then what writes and what reads states; rows may be apart.
    dt: [T, H], time steps before their bias and softplus; rows may be apart.
    conv_weight: [channels of xbc, W]; a silu follows. conv_bias: [channels] or None.
    a_log, dt_bias, d: [H] float32.
    output: [T, H, P], contiguous.
    layer_index: of the cache entry.
    dt_min, dt_max: bounds of time steps.

    Source: Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060), section 7.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, StateCacheData), f"entry {layer_index} keeps no state"
    if has_kernels(xbc.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.recurrence import (
            causal_conv as conv_kernel,
        )
        from models.kernels.recurrence import state_space as kernel

        mixed = torch.empty(xbc.shape, dtype=xbc.dtype, device=xbc.device)
        conv_kernel.causal_conv(xbc, conv_weight, conv_bias, mixed, cache, metadata, activates=True)
        kernel.state_space(
            mixed, dt, a_log, dt_bias, d, output, cache, metadata,
            num_groups=num_groups, state_size=state_size, dt_limits=(dt_min, dt_max),
        )  # fmt: skip
        return
    _reference(xbc, dt, conv_weight, conv_bias, a_log, dt_bias, d, output, cache, metadata,
               num_groups, state_size, dt_min, dt_max)  # fmt: skip


def _reference(  # noqa: PLR0913  # see the operator
    xbc: torch.Tensor,
    dt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    num_groups: int,
    state_size: int,
    dt_min: float,
    dt_max: float,
) -> None:
    """Computes the operator in PyTorch."""
    num_heads, head_dim = output.shape[1:]
    group_size = num_groups * state_size
    sizes = [num_heads * head_dim, group_size, group_size]
    for run in request_runs(metadata):
        mixed = causal_conv(xbc, conv_weight, conv_bias, cache, run, activates=True)
        # Kernels read what the convolution rounded.
        x, b, c = torch.split(mixed.to(xbc.dtype).float(), sizes, dim=-1)
        x = x.view(*run.tokens.shape, num_heads, head_dim)
        b, c = (
            each.view(*run.tokens.shape, num_groups, state_size).repeat_interleave(
                num_heads // num_groups, dim=2
            )
            for each in (b, c)
        )
        time = functional.softplus(dt[run.tokens].float() + dt_bias).clamp(dt_min, dt_max)
        time = time.unsqueeze(-1)
        decay = -a_log.exp().view(num_heads, 1) * time
        # States are [P, N]: the rule's, transposed.
        result = scan(
            (c, b, time * x, decay), cache, run,
            step=_transposed(decayed_step), chunk=_transposed(decayed_chunk),
        )  # fmt: skip
        output[run.tokens] = (result + d.view(num_heads, 1) * x).to(output.dtype)


def _transposed(rule: Rule) -> Rule:
    """Returns a rule for states whose last two dimensions are swapped."""

    def swapped(state: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, output = rule(state.transpose(-1, -2), *inputs)
        return state.transpose(-1, -2), output

    return swapped
