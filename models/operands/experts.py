"""The operands of a mixture of experts: routing rules and weights."""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from models.number_formats import FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are chosen and weighted; see models.ops.experts.moe.route.

    top_k: experts of each token.
    is_sigmoid: scores are the sigmoid of the logits, not the softmax over all experts.
    is_normed: weights are made to sum to 1.
    scaling: factor of all weights.
    num_groups: equal groups of experts.
    top_groups: groups that a token's experts come from.
    """

    top_k: int
    is_sigmoid: bool
    is_normed: bool
    scaling: float
    num_groups: int
    top_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAdapters:
    """Low-rank adapters of experts. S slots of adapters, R their largest rank.

    gate_up_a: [S, E, num_parts * R, H]. gate_up_b: [S, E, num_parts * I, R], scaled.
    down_a: [S, E, R, I]. down_b: [S, E, H, R], scaled.
    slots: of each token, [at least T] int32: 0 for none, n + 1 for slot n.
    """

    gate_up_a: torch.Tensor
    gate_up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Experts and their gate. E experts, H hidden size, I inner size of one expert.

    gate_up: [E, 2 * I, H], gate before up; its bias [E, 2 * I] or None.
    down: [E, H, I]; its bias [E, H] or None.
    gate_up_scale, down_scale: of weights in 8 or 4 bits, see models.ops.experts.expert_formats.
    alpha, limit, adds_one: of the gate, see `activate`.
    is_squared: experts have no gate, but the square of a ReLU: gate_up is up alone, [E, I, H].
    is_gelu: the gate is a gelu, by tanh, not a silu; weights are in the model's dtype.
    num_routed: experts that tokens choose from, if these are only some of them. Ids then count
        from the first of these, and E stands for an expert that is not here.
    adapters: of tokens that have one; None where the layer has no room for any.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    alpha: float = 1.0
    limit: float | None = None
    adds_one: bool = True
    is_squared: bool = False
    is_gelu: bool = False
    num_routed: int | None = None
    adapters: ExpertAdapters | None = None

    @property
    def num_choices(self) -> int:
        """Experts that tokens choose from."""
        return len(self.down) if self.num_routed is None else self.num_routed

    @property
    def is_partial(self) -> bool:
        """Whether tokens may choose experts that are not here."""
        return self.num_routed is not None

    @property
    def inner_size(self) -> int:
        """I."""
        return self.gate_up.shape[1] // self.num_parts

    @property
    def num_parts(self) -> int:
        """Matrices that gate_up stacks."""
        return 1 if self.is_squared else 2

    @property
    def clamp(self) -> int:
        """How kernels clamp gate and up: 0 not at all, 1 before adding one to up, 2 alone."""
        if self.limit is None:
            return 0
        return 1 if self.adds_one else 2

    def of_tokens(self, tokens: slice) -> "ExpertWeights":
        """Returns the experts for some of the step's tokens."""
        if self.adapters is None:
            return self
        return replace(self, adapters=replace(self.adapters, slots=self.adapters.slots[tokens]))

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Maps results of gate_up, [..., num_parts * I], to [..., I].

        The gate is silu(gate) * up. With a limit it clamps the gate from above and up on both
        sides, and is gate * sigmoid(alpha * gate) * (up + 1), or without adds_one times up.

        Source: OpenAI 2025, "gpt-oss model card", section 2.2.
        """
        if self.is_squared:
            return gate_up.relu().square()
        gate, up = gate_up.chunk(2, dim=-1)
        if self.is_gelu:
            return functional.gelu(gate, approximate="tanh") * up
        if self.limit is None:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1 if self.adds_one else up)

    def biases_or(self, stand_in: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both biases; without them twice `stand_in`, which kernels then do not touch."""
        if self.gate_up_bias is None or self.down_bias is None:
            return stand_in, stand_in
        return self.gate_up_bias, self.down_bias

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have scales."""
        return self.down_scale is not None

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are FP8."""
        return self.down.dtype == FP8

    @property
    def is_scaled_by_row(self) -> bool:
        """Whether each row of an FP8 matrix has one scale, not each block."""
        return self.down_scale is not None and self.down_scale.shape[1:] == (self.down.shape[1], 1)
