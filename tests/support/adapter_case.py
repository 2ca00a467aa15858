"""Products with adapters, for tests of operators and kernels."""

import torch

CASES = [
    (1, 70, (40,), 4),
    (5, 520, (20, 70, 70, 9), 16),
    (37, 130, (33, 66), 8),
    (64, 70, (300, 41), 16),
    (80, 90, (20, 30, 10), 32),
    (20, 300, (80, 80), 8),
    (33, 600, (70,), 128),
    (260, 40, (50,), 8),
    (3, 9000, (20,), 4),
    (530, 20, (20, 20), 8),
]
"""Tokens, inputs, outputs of each part, rank."""
NUM_SLOTS = 3


def make_adapter_case(
    num_tokens, num_inputs, parts, rank, *, dtype, device="cpu", num_slots=NUM_SLOTS
):
    """Returns the arguments of `add_slots`: inputs are strided, and slots more than tokens."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape, size=1.0):
        return (torch.randn(shape, generator=generator) * size).to(dtype).to(device)

    x = draw(num_tokens, 2 * num_inputs)[:, num_inputs // 2 :][:, :num_inputs]
    a = draw(num_slots, len(parts) * rank, num_inputs, size=num_inputs**-0.5)
    b = draw(num_slots, sum(parts), rank, size=rank**-0.5)
    slots = torch.randint(0, num_slots + 1, (num_tokens + 7,), generator=generator).int()
    return draw(num_tokens, sum(parts)), x, a, b, parts, slots.to(device)
