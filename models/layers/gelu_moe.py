"""Experts whose gate is a gelu, and their router, as a layer."""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.experts import Experts
from models.layers.moe import moe_config
from models.layers.quantization import Packing
from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.experts.gelu_moe import gelu_moe
from models.ops.products.linear import linear
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import ParallelGroup


class ScaledRouter(Replicated, nn.Module):
    """Scores every expert for every token, whose state it normalises; every rank holds all of it.

    scale: of each feature. per_expert_scale: of each expert's result.
    """

    def __init__(self, hidden_size: int, num_experts: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self._factor = hidden_size**-0.5
        self.scale = empty_parameter(hidden_size)
        self.per_expert_scale = empty_parameter(num_experts)
        self.proj = ScoreProjection(hidden_size, num_experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to logits, [T, experts]."""
        normed = rms_norm(hidden, self.scale * self._factor, self._eps)
        return linear(normed, self.proj.weight, None)


class ScoreProjection(Replicated, nn.Module):
    """The router's matrix, [experts, hidden]."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size)


class StackedExperts(Experts):
    """Experts whose checkpoint stacks all of a layer; weights are in the model's dtype."""

    def can_keep_fp8(self, block_size: tuple[int, int] | None) -> bool:
        """Returns False: gelu_moe has no such products."""
        del block_size
        return False

    def can_keep_packed(self, packing: Packing) -> bool:
        """Returns False: gelu_moe has no such products."""
        del packing
        return False

    def can_keep_mxfp4(self) -> bool:
        """Returns False: gelu_moe has no such products."""
        return False


class GeluMoE(nn.Module):
    """A sparse feed-forward layer: each token uses its best experts.

    The router scores another state than the one that experts get.

    Source: transformers 5.23, models/gemma4.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        moe = moe_config(config)
        if group.enable_expert_parallel:
            raise ValueError(f"experts of {config.architecture} cannot be spread over ranks")
        self._group = group
        self._top_k = moe.num_experts_per_tok
        self.router = ScaledRouter(config.hidden_size, moe.num_experts, config.rms_norm_eps)
        self.experts = StackedExperts(config.hidden_size, moe, bias=False, group=group)

    def forward(self, hidden: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """Maps the input of experts and of the router, both [T, hidden], to [T, hidden]."""
        output = gelu_moe(
            hidden, self.router(scored), self.router.per_expert_scale,
            self.experts.gate_up_proj, self.experts.down_proj, self._top_k,
            *self.experts.adapter_arguments,
        )  # fmt: skip
        return output if self._group.size == 1 else all_reduce(output, self._group.name)
