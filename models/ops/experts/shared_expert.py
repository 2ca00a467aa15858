"""Routed experts with the expert that all tokens share beside them: octavo::fused_moe_with_shared.

Few tokens leave most of a GPU idle in either, so they run on two streams.
"""

import functools

import torch

from models.batch_invariance import is_batch_invariant
from models.kernels.gpu import has_kernels
from models.operands.weight_scales import is_by_block
from models.ops.custom_op import like, operator
from models.ops.experts.moe import fused_moe
from models.ops.products.activation_rounding import rounds_activations
from models.ops.products.fp8_linear import (
    product_of_rounded,
    rounded_for,
    rounded_gated_product,
)
from models.ops.products.linear import linear
from models.ops.products.norm_linear import gated_linear

MOST_TOKENS = 512
"""Up to this many tokens two streams win: 1.4 % of a step of GLM-4.5-Air's layers with 128 tokens;
they lose 1 % with 2048, which fill the GPU alone (H200, 2026-11)."""


@operator(like("hidden"))
def fused_moe_with_shared(  # noqa: PLR0913  # an operator takes no dataclasses
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    top_k: int,
    is_sigmoid: bool,
    is_normed: bool,
    scaling: float,
    num_groups: int,
    top_groups: int,
    alpha: float,
    limit: float | None,
    adds_one: bool,
    shared_gate_up: torch.Tensor,
    shared_gate_up_scale: torch.Tensor | None,
    shared_gate_up_bias: torch.Tensor | None,
    shared_down: torch.Tensor,
    shared_down_scale: torch.Tensor | None,
    shared_down_bias: torch.Tensor | None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns fused_moe plus the feed-forward layer that all tokens share, [T, H].

    The first 18 arguments are those of `fused_moe`. A shared weight with a scale is FP8, as in
    `linear`. On a GPU the shared layer of a few tokens runs on a second stream
    between two events, also while a graph is captured.

    shared_gate_up: [2 * I, H], gate before up; its bias [2 * I].
    shared_down: [H, I]; its bias [H].
    shared_gate: [1, H]; the sigmoid of its product with a token scales the shared layer's output.
    """
    routed = (
        hidden, router_logits, gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale,
        correction_bias, top_k, is_sigmoid, is_normed, scaling, num_groups, top_groups,
        alpha, limit, adds_one,
    )  # fmt: skip
    first = (shared_gate_up, shared_gate_up_scale, shared_gate_up_bias)
    second = (shared_down, shared_down_scale, shared_down_bias)
    if not hidden.is_cuda or hidden.shape[0] > MOST_TOKENS:
        shared = _shared(hidden, first, second)
        return _add_shared(fused_moe(*routed), shared, hidden, shared_gate)
    main, side = torch.cuda.current_stream(hidden.device), _side_stream(hidden.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shared = _shared(hidden, first, second)
    output = fused_moe(*routed)
    main.wait_stream(side)
    if not torch.cuda.is_current_stream_capturing():
        # Its memory is the side stream's, which must not reuse it while the sum reads it. While a
        # graph is captured nothing else uses the side stream.
        shared.record_stream(main)
    return _add_shared(output, shared, hidden, shared_gate)


def _add_shared(
    output: torch.Tensor, shared: torch.Tensor, hidden: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """Adds the shared layer's output, scaled by its gate if there is one, in place."""
    if gate is None:
        return output.add_(shared)
    if not has_kernels(hidden.device) or is_batch_invariant():
        return output.add_(linear(hidden, gate, None).sigmoid() * shared)
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.elementwise.add_gated import add_gated

    add_gated(output, shared, hidden, gate)
    return output


Weight = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""A weight, its scale and its bias."""


def _shared(hidden: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    weight, scale, bias = gate_up
    down_weight, down_scale, down_bias = down
    rounds = has_kernels(hidden.device) and not is_batch_invariant()
    rounds &= rounds_activations(hidden.shape[0], hidden.dtype)
    if scale is None or down_scale is None or not rounds:
        inner = gated_linear(hidden, weight, bias, scale)
        return linear(inner, down_weight, down_bias, down_scale)
    operands = (*rounded_for(hidden, weight, scale), weight, scale, bias, hidden.dtype)
    gated = rounded_gated_product(*operands, is_blocked=is_by_block(down_weight, down_scale))
    return product_of_rounded(*gated, down_weight, down_scale, down_bias, hidden.dtype)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the second stream of a device, always the same."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
