"""Mixture of experts, as a layer: a router, its experts, and experts that all tokens share."""

from collections.abc import Collection

import torch
from torch import nn

import models.ops.experts.expert_parallel
import models.ops.experts.moe  # noqa: F401  # both register an operator
from models.batch_invariance import is_batch_invariant
from models.config import ModelConfig
from models.config_sections.families import FAMILIES_OF_EXPERTS
from models.config_sections.moe import MoeConfig
from models.layers.clamped_mlp import dense_mlp
from models.layers.experts import Experts
from models.layers.gated_mlp import GatedMLP
from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.ops.products.linear import linear
from models.ops.ranks.all_reduce import all_reduce
from models.ops.ranks.gather_rows import gather_rows, reduce_scatter
from models.ops.ranks.ordered_reduce_scatter import ordered_reduce_scatter
from models.parallel.group import DATA_PARALLEL, ParallelGroup


class Router(Replicated, nn.Module):
    """Scores every expert for every token; every rank holds all of it.

    With sigmoid scores, which differ little, it works in float32 and not in the model's dtype.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig, *, bias: bool) -> None:
        super().__init__()
        is_sigmoid = moe.scoring_func == "sigmoid"
        self.weight = empty_parameter(moe.num_experts, hidden_size)
        if is_sigmoid:
            self.weight = nn.Parameter(self.weight.float(), requires_grad=False)
        self.bias = empty_parameter(moe.num_experts) if bias else None
        self.e_score_correction_bias: nn.Parameter | None = None
        if is_sigmoid:
            correction = torch.empty(moe.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(correction, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to logits, [T, experts]."""
        return linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class SharedGate(Replicated, nn.Module):
    """Weighs, for each token, the output of the layer that all tokens share."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(1, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to factors from 0 to 1, [T, 1]."""
        return linear(hidden, self.weight, None).sigmoid()


class FusedMoE(nn.Module):
    """A sparse feed-forward layer: each token uses its best experts and the shared ones."""

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        router_bias: bool = False,
        experts: Experts | None = None,
    ) -> None:
        """Builds the layer; `experts` replaces the default ones without bias.

        Raises:
            ValueError: the ranks cannot share the experts.
        """
        super().__init__()
        moe = moe_config(config)
        self._moe = moe
        self._group = group
        self._gathers = group.data_parallel_size > 1
        self._sums_in_order = is_batch_invariant()
        self.gate = Router(config.hidden_size, moe, bias=router_bias)
        self.experts = experts or Experts(config.hidden_size, moe, bias=False, group=group)
        # A placement changes while serving; traced code must not depend on it.
        self._has_whole_experts = self.experts.placement is not None
        self.shared_experts: GatedMLP | None = None
        if moe.shared_size:
            self.shared_experts = dense_mlp(config, group, moe.shared_size, is_reduced=False)
        self.shared_expert_gate = SharedGate(config.hidden_size) if moe.has_shared_gate else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        moe, experts = self._moe, self.experts
        rows = hidden
        if self._gathers:
            rows = gather_rows(hidden, DATA_PARALLEL, self._group.data_parallel_size)
        logits = self.gate(rows)
        if moe.scales_input:
            # The weight of the one expert is then 1, as weights are normalised.
            rows = sigmoid_gate(rows, logits.amax(-1, keepdim=True))
        arguments = (
            rows,
            logits,
            experts.gate_up_proj,
            experts.down_proj,
            experts.gate_up_proj_bias,
            experts.down_proj_bias,
            experts.gate_up_proj_scale,
            experts.down_proj_scale,
            self.gate.e_score_correction_bias,
            moe.num_experts_per_tok,
            moe.scoring_func == "sigmoid",
            moe.norm_topk_prob,
            moe.routed_scaling_factor,
            moe.n_group,
            moe.topk_group,
            moe.swiglu_alpha,
            moe.swiglu_limit,
            moe.adds_one,
        )
        output: torch.Tensor
        if self._has_whole_experts:
            output = torch.ops.octavo.expert_parallel_moe(
                *arguments,
                experts.expert_map,
                experts.expert_load,
                self._gathers,
                *experts.adapter_arguments,
            )
        else:
            output = torch.ops.octavo.fused_moe(*arguments, *experts.adapter_arguments)
        if self._gathers:
            share_out = ordered_reduce_scatter if self._sums_in_order else reduce_scatter
            output = share_out(output, DATA_PARALLEL, self._group.data_parallel_size)
        if self.shared_experts is not None:
            shared = self.shared_experts(hidden)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(hidden) * shared
            output = output + shared
        return output if self._group.size == 1 else all_reduce(output, self._group.name)

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        shared = self.shared_experts
        has_one = self._group.size == 1 and not self._gathers
        # The fused operator has one input for both, and one gate.
        differs = self._moe.scales_input or self._moe.clamps_all
        if shared is None or differs or shared.has_packed_weights or not has_one:
            return ()
        return {"multi_stream"}


def feed_forward(
    config: ModelConfig,
    layer_index: int,
    group: ParallelGroup,
    experts_class: type[Experts] = Experts,
) -> nn.Module:
    """Returns a layer's feed-forward part: dense or with experts, by the config."""
    moe = moe_config(config)
    if layer_index in moe.dense_layers:
        return dense_mlp(config, group, config.intermediate_size)
    experts = experts_class(config.hidden_size, moe, bias=False, group=group)
    return FusedMoE(config, group, experts=experts)


def optional_feed_forward(config: ModelConfig, layer_index: int, group: ParallelGroup) -> nn.Module:
    """Returns a layer's feed-forward part: with experts if the config names some.

    Raises:
        ValueError: it names none, and the family has no model without.
    """
    if config.moe is None and config.architecture not in FAMILIES_OF_EXPERTS:
        return GatedMLP(config, group)
    return feed_forward(config, layer_index, group)


def moe_config(config: ModelConfig) -> MoeConfig:
    """Returns a config's experts.

    Raises:
        ValueError: it has none.
    """
    if config.moe is None:
        raise ValueError(f"{config.architecture} needs experts, and its config names none")
    return config.moe
