"""Adapters of experts with random contents."""

import torch

from models.operands.experts import ExpertAdapters


def make_expert_adapters(
    experts, num_tokens, *, rank=5, num_slots=3, dtype=torch.float32, device="cpu", seed=0
):
    """Returns adapters of experts, and slots for more tokens than there are."""
    generator = torch.Generator(device).manual_seed(seed)
    count, hidden = experts.down.shape[:2]
    parts, inner = experts.num_parts, experts.inner_size

    def draw(*shape):
        values = torch.randn(num_slots, count, *shape, generator=generator, device=device)
        return (values * shape[-1] ** -0.5).to(dtype)

    slots = torch.randint(num_slots + 1, (num_tokens + 7,), generator=generator, device=device)
    return ExpertAdapters(
        gate_up_a=draw(parts * rank, hidden),
        gate_up_b=draw(parts * inner, rank),
        down_a=draw(rank, inner),
        down_b=draw(hidden, rank),
        slots=slots.int(),
    )


def exact_adapters(adapters):
    """Returns the same adapters in float64."""
    names = ("gate_up_a", "gate_up_b", "down_a", "down_b")
    matrices = {name: getattr(adapters, name).double() for name in names}
    return ExpertAdapters(**matrices, slots=adapters.slots)
