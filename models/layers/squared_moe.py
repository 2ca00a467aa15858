"""Mixture of experts without gates, as a layer."""

import torch
from torch import nn

from models.batch_invariance import is_batch_invariant
from models.config import ModelConfig
from models.layers.experts import Experts
from models.layers.linear import MergedColumnParallelLinear
from models.layers.moe import Router, moe_config
from models.layers.squared_mlp import SquaredMLP
from models.ops.experts.squared_moe import squared_moe
from models.ops.ranks.all_reduce import all_reduce
from models.ops.ranks.gather_rows import gather_rows, reduce_scatter
from models.ops.ranks.ordered_reduce_scatter import ordered_reduce_scatter
from models.parallel.group import DATA_PARALLEL, SINGLE, ParallelGroup


class SquaredMoE(nn.Module):
    """A sparse feed-forward layer: each token uses its best experts, and one that all share.

    Experts may work on a smaller projection of the hidden state.

    Source: NVIDIA 2025, "Nemotron 3", section 2.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        moe, hidden = moe_config(config), config.hidden_size
        self._moe = moe
        self._group = group
        self._gathers = group.data_parallel_size > 1
        self._sums_in_order = is_batch_invariant()
        size = moe.latent_size or hidden
        self.gate = Router(hidden, moe, bias=False)
        self.experts = Experts(size, moe, bias=False, group=group, has_gate=False)
        # A placement changes while serving; traced code must not depend on it.
        self._has_whole_experts = self.experts.placement is not None
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
        moe, experts, correction = self._moe, self.experts, self.gate.e_score_correction_bias
        assert correction is not None, "scores are sigmoids"
        # Before rows are gathered: adapters are those of this rank's tokens.
        x, rows = self.fc1_latent_proj(hidden) if self._has_latent else hidden, hidden
        if self._gathers:
            size = self._group.data_parallel_size
            rows = gather_rows(hidden, DATA_PARALLEL, size)
            x = gather_rows(x, DATA_PARALLEL, size) if self._has_latent else rows
        is_placed = self._has_whole_experts
        output = squared_moe(
            x, self.gate(rows), experts.gate_up_proj, experts.down_proj,
            experts.gate_up_proj_scale, experts.down_proj_scale, correction,
            moe.num_experts_per_tok, moe.norm_topk_prob, moe.routed_scaling_factor, moe.n_group,
            moe.topk_group, experts.expert_map if is_placed else None,
            experts.expert_load if is_placed else None, self._gathers,
            *experts.adapter_arguments,
        )  # fmt: skip
        if self._gathers:
            share_out = ordered_reduce_scatter if self._sums_in_order else reduce_scatter
            output = share_out(output, DATA_PARALLEL, self._group.data_parallel_size)
        if self._group.size > 1:
            output = all_reduce(output, self._group.name)
        if self._has_latent:
            output = self.fc2_latent_proj(output)
        summed: torch.Tensor = output + self.shared_experts(hidden)
        return summed
