"""The indexer of sparse attention: small heads that choose which tokens a query attends to.

Released checkpoints were trained to score in FP8, after a Hadamard transform of queries and keys.
The transform does not change their products, so it is left out. Queries and keys are FP8 if the
cache is, and scores are float32.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from models.config import ModelConfig
from models.config_sections.mla import IndexConfig, MlaConfig
from models.layers.linear import MergedColumnParallelLinear
from models.layers.rotary import Rotation
from models.layers.rotary_heads import RotaryColumnLinear, head_order, reorder_heads
from models.layers.weight import Replicated, ShardId, empty_parameter
from models.parallel.group import SINGLE


class Indexer(nn.Module):
    """Makes the queries, keys and weights of the index; every rank computes all of them.

    Rotates as many elements of each head as attention rotates: the first or the last ones.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2.1.
    """

    def __init__(self, config: ModelConfig, mla: MlaConfig, index: IndexConfig) -> None:
        super().__init__()
        assert mla.q_lora_rank is not None, "the config was checked"
        self._index = index
        self._rope_dim = mla.qk_rope_head_dim
        self._scale = (index.head_dim * index.num_heads) ** -0.5
        q_size = index.num_heads * index.head_dim
        rope = replace(config.rope, is_interleaved=index.is_interleaved)
        order = head_order(self._rope_dim, rope)
        others = list(range(self._rope_dim, index.head_dim))
        if index.rotates_last:
            num_others = len(others)
            order, others = [num_others + at for at in order], list(range(num_others))
        order += others
        self.wq_b = _rotated(mla.q_lora_rank, q_size, order)
        self.wk = _rotated(config.hidden_size, index.head_dim, order)
        self.k_norm = KeyNorm(order, index.key_norm_eps)
        self.weights_proj = _replicated(config.hidden_size, index.num_heads)

    def forward(
        self, hidden: torch.Tensor, compressed_q: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Returns the index arguments of the latent attention operator.

        compressed_q: [T, q_lora_rank], normalised.
        """
        queries = self.wq_b(compressed_q).view(hidden.shape[0], -1, self._index.head_dim)
        keys = self.k_norm(self.wk(hidden)).unsqueeze(1)
        weights = self.weights_proj(hidden).float() * self._scale
        queries, keys = (self._rotate(heads, rotation) for heads in (queries, keys))
        return queries, keys.squeeze(1), weights, self._index.top_k

    def _rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        rotated = rotation.turn(heads[..., : self._rope_dim])
        return torch.cat((rotated, heads[..., self._rope_dim :]), dim=-1)


class KeyNorm(Replicated, nn.Module):
    """Layer normalisation with a gain and a bias, whose elements are in an order of their own."""

    def __init__(self, order: Sequence[int], eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(len(order))
        self.bias = empty_parameter(len(order))
        self._order, self._eps = order, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor, reordered."""
        super().weight_loader(param, reorder_heads(loaded, self._order), shard_id)


def _rotated(input_size: int, output_size: int, order: Sequence[int]) -> RotaryColumnLinear:
    """Returns a projection to heads of an order that every rank computes whole."""
    return RotaryColumnLinear(input_size, [output_size], orders=[order], bias=False, group=SINGLE)


def _replicated(input_size: int, output_size: int) -> MergedColumnParallelLinear:
    """Returns a projection that every rank computes whole, as a group of one."""
    return MergedColumnParallelLinear(input_size, [output_size], bias=False, group=SINGLE)
