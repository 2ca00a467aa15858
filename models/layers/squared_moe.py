"""Mixture of experts without gates, as a layer."""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.linear import MergedColumnParallelLinear
from models.layers.moe import Router, moe_config
from models.layers.squared_mlp import SquaredMLP
from models.layers.weight import ShardId, check_shape, empty_parameter
from models.ops.experts.squared_moe import squared_moe
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import SINGLE, ParallelGroup


class SquaredExperts(nn.Module):
    """The weights of routed experts: up_proj [E, I / ranks, H] and down_proj [E, H, I / ranks]."""

    def __init__(
        self, num_experts: int, hidden_size: int, inner_size: int, group: ParallelGroup
    ) -> None:
        super().__init__()
        self._group = group
        local_size = group.split(inner_size, "inner features of an expert")
        self.up_proj = empty_parameter(num_experts, local_size, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, local_size)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share of one expert's tensor."""
        assert isinstance(shard_id, tuple), "experts are numbered"
        expert, _ = shard_id
        assert expert is not None, "each expert is stored by itself"
        dim = 0 if param is self.up_proj else 1
        shape = list(param.shape[1:])
        share = shape[dim]
        shape[dim] *= self._group.size
        check_shape(loaded, tuple(shape))
        param[expert].copy_(loaded.narrow(dim, self._group.rank * share, share))


class SquaredMoE(nn.Module):
    """A sparse feed-forward layer: each token uses its best experts, and one that all share.

    Experts may work on a smaller projection of the hidden state.

    Source: NVIDIA 2025, "Nemotron 3", section 2.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        moe, hidden = moe_config(config), config.hidden_size
        if group.enable_expert_parallel:
            raise ValueError(f"experts of {config.architecture} cannot be spread over ranks")
        self._moe = moe
        self._group = group
        size = moe.latent_size or hidden
        self.gate = Router(hidden, moe, bias=False)
        self.experts = SquaredExperts(moe.num_experts, size, moe.intermediate_size, group)
        self.shared_experts = SquaredMLP(config, group, inner_size=moe.shared_size)
        self._has_latent = moe.latent_size > 0
        if self._has_latent:
            # Every rank computes all of it, as a group of one.
            bias = config.mlp_bias
            self.fc1_latent_proj = MergedColumnParallelLinear(
                hidden, [size], bias=bias, group=SINGLE
            )
            self.fc2_latent_proj = MergedColumnParallelLinear(
                size, [hidden], bias=bias, group=SINGLE
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        moe, correction = self._moe, self.gate.e_score_correction_bias
        assert correction is not None, "scores are sigmoids"
        x = self.fc1_latent_proj(hidden) if self._has_latent else hidden
        output = squared_moe(
            x, self.gate(hidden), self.experts.up_proj, self.experts.down_proj, correction,
            moe.num_experts_per_tok, moe.norm_topk_prob, moe.routed_scaling_factor, moe.n_group,
            moe.topk_group,
        )  # fmt: skip
        if self._group.size > 1:
            output = all_reduce(output, self._group.name)
        if self._has_latent:
            output = self.fc2_latent_proj(output)
        summed: torch.Tensor = output + self.shared_experts(hidden)
        return summed
