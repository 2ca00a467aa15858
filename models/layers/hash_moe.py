"""Experts that a table gives for each token id, or the best ones by the root of softplus scores.

Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.1; transformers 5.24, models/deepseek_v4.
"""

import torch
from torch import nn
from torch.nn import functional

from models.config import ModelConfig
from models.config_sections.moe import MoeConfig
from models.layers.clamped_mlp import dense_mlp
from models.layers.experts import Experts
from models.layers.hyper_connection import HyperDecoder
from models.layers.moe import moe_config
from models.layers.weight import Replicated, empty_parameter
from models.ops.experts.chosen_moe import chosen_moe
from models.ops.products.linear import linear
from models.ops.ranks.all_reduce import all_reduce
from models.parallel.group import ParallelGroup


class RootRouter(Replicated, nn.Module):
    """Weighs experts by the square root of softplus, and chooses the best corrected ones.

    It works in float32; every rank holds all of it.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self._moe = moe
        self.weight = empty_parameter(moe.num_experts, hidden_size, dtype=torch.float32)
        self._add_choice(moe)

    def _add_choice(self, moe: MoeConfig) -> None:
        self.e_score_correction_bias = empty_parameter(moe.num_experts, dtype=torch.float32)

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps [T, hidden] to float32 weights and ids of experts, both [T, top_k]."""
        scores = functional.softplus(linear(hidden.float(), self.weight, None)).sqrt()
        ids = self.chosen(scores, token_ids)
        weights = scores.gather(1, ids)
        if self._moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self._moe.routed_scaling_factor, ids

    def chosen(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Returns the experts of the best corrected scores, [T, top_k]."""
        del token_ids
        corrected = scores + self.e_score_correction_bias
        return corrected.topk(self._moe.num_experts_per_tok, dim=-1).indices


class HashRouter(RootRouter):
    """Weighs the experts that a table has for each token id."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        self._vocab_size = config.vocab_size
        super().__init__(config.hidden_size, moe)

    def _add_choice(self, moe: MoeConfig) -> None:
        shape = self._vocab_size, moe.num_experts_per_tok
        self.tid2eid = empty_parameter(*shape, dtype=torch.int64)

    def chosen(self, scores: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Returns the experts of each token id, [T, top_k]."""
        del scores
        assert token_ids is not None, "the layer was built on the first stage"
        return self.tid2eid[token_ids]


class HashDecoder(HyperDecoder):
    """A decoder of hyper layers that get the token ids."""

    def token_inputs(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Returns the token ids for each layer, [T, layers]; None after the first stage."""
        del embedded
        if not self._embeds:
            return None
        return token_ids.unsqueeze(1).expand(-1, self._num_layers)


class HashMoE(nn.Module):
    """A sparse feed-forward layer: each token uses its experts and the shared ones."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__()
        moe = moe_config(config)
        if group.enable_expert_parallel:
            raise ValueError(f"experts of {config.architecture} cannot be spread over ranks")
        is_hashed = layer_index in moe.hash_layers
        if is_hashed and not group.stage.is_first:
            raise ValueError(
                f"layer {layer_index} chooses experts by token ids, which later pipeline stages do "
                "not get: choose others with --pipeline-layers"
            )
        self._moe, self._group = moe, group
        size = config.hidden_size
        self.gate = HashRouter(config, moe) if is_hashed else RootRouter(size, moe)
        self.experts = Experts(size, moe, bias=False, group=group)
        self.shared_experts = dense_mlp(config, group, moe.shared_size, is_reduced=False)

    def forward(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]. token_ids: [T]; None after the first stage."""
        moe, experts = self._moe, self.experts
        weights, ids = self.gate(hidden, token_ids)
        output = chosen_moe(
            hidden, weights, ids, experts.gate_up_proj, experts.down_proj,
            experts.gate_up_proj_scale, experts.down_proj_scale, moe.swiglu_alpha,
            moe.swiglu_limit, moe.adds_one, *experts.adapter_arguments,
        )  # fmt: skip
        output = output + self.shared_experts(hidden)
        return output if self._group.size == 1 else all_reduce(output, self._group.name)
