"""Tokens, logits and experts with random contents, and ways to route them."""

import torch

from models.ops.experts import ExpertWeights, Routing

ROUTINGS = {
    "softmax": Routing(
        top_k=3, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
    ),
    "softmax-groups": Routing(
        top_k=3, is_sigmoid=False, is_normed=False, scaling=16.0, num_groups=3, top_groups=2
    ),
    "sigmoid-groups": Routing(
        top_k=4, is_sigmoid=True, is_normed=True, scaling=2.5, num_groups=4, top_groups=2
    ),
    "all": Routing(
        top_k=12, is_sigmoid=False, is_normed=False, scaling=1.0, num_groups=1, top_groups=1
    ),
}
NUM_EXPERTS = 12
"""What ROUTINGS are made for."""


def make_logits(num_tokens, routing, *, num_experts=NUM_EXPERTS, device="cpu", seed=0):
    """Returns router logits, and a correction bias where the routing has one."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
    bias = torch.randn(num_experts, generator=generator, device=device)
    return logits, bias if routing.is_sigmoid else None


def make_experts(
    *,
    num_experts=NUM_EXPERTS,
    hidden=36,
    inner=20,
    dtype=torch.float32,
    device="cpu",
    is_clamped=False,
    seed=0,
):
    """Returns experts; clamped ones have biases."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, device=device)
        return (values * shape[-1] ** -0.5).to(dtype)

    weights = {
        "gate_up": draw(num_experts, 2 * inner, hidden),
        "down": draw(num_experts, hidden, inner),
    }
    if not is_clamped:
        return ExpertWeights(**weights)
    return ExpertWeights(
        **weights,
        gate_up_bias=draw(num_experts, 2 * inner),
        down_bias=draw(num_experts, hidden),
        alpha=1.702,
        limit=0.5,
    )


def exactly(experts):
    """Returns the same experts in float64 on the CPU, where the reference runs."""

    def double(x):
        return None if x is None else x.detach().cpu().double()

    return ExpertWeights(
        gate_up=double(experts.gate_up),
        down=double(experts.down),
        gate_up_bias=double(experts.gate_up_bias),
        down_bias=double(experts.down_bias),
        alpha=experts.alpha,
        limit=experts.limit,
    )
