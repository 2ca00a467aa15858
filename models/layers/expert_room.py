"""Room for low-rank adapters of one product of routed experts."""

from collections.abc import Sequence

import torch
from torch import nn


class ExpertRoom(nn.Module):
    """Static buffers for adapters of all experts, like those of models.layers.quantization.

    S slots, E experts, P parts, R the largest rank, K inputs, N outputs of an expert on this rank.
    adapter_a: [S, E, P * R, K]. adapter_b: [S, E, N, R], scaled.
    held: the expert of each E, of adapters that are in host memory with all experts; None: host
        memory has those of E alone.
    """

    adapter_a: torch.Tensor
    adapter_b: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        part_sizes: tuple[int, ...],
        num_inputs: int,
        *,
        num_slots: int,
        max_rank: int,
        like: torch.Tensor,
    ) -> None:
        """Makes empty slots, in the dtype and on the device of `like`.

        part_sizes: outputs of each part.
        """
        super().__init__()
        self.held: Sequence[int] | None = None
        self.num_experts, self.part_sizes, self.num_inputs = num_experts, part_sizes, num_inputs
        a = like.new_zeros(num_slots, num_experts, len(part_sizes) * max_rank, num_inputs)
        b = like.new_zeros(num_slots, num_experts, sum(part_sizes), max_rank)
        self.register_buffer("adapter_a", a, persistent=False)
        self.register_buffer("adapter_b", b, persistent=False)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """adapter_a and adapter_b."""
        return self.adapter_a, self.adapter_b
