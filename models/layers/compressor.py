"""Projections of tokens to what compressed keys are made of."""

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.compression import CompressionConfig
from models.layers.linear import MergedColumnParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.pair_rotation import turn_pairs
from models.parallel.group import SINGLE


class Compressor(Replicated, nn.Module):
    """Makes values and gates of each token, and weights that the operator compresses with.

    Every rank computes all of it. size: elements of an entry.
    """

    def __init__(self, config: ModelConfig, size: int, *, rate: int, overlaps: bool) -> None:
        super().__init__()
        width = 2 * size if overlaps else size
        self.kv_gate_proj = MergedColumnParallelLinear(
            config.hidden_size, [width, width], bias=False, group=SINGLE
        )
        self.position_bias = empty_parameter(rate, width, dtype=torch.float32)
        self.kv_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to values and gates, [T, 2 * width]."""
        projected: torch.Tensor = self.kv_gate_proj(hidden)
        return projected


class EntryIndexer(Compressor):
    """Chooses compressed entries by entries of its own; every rank computes all of it."""

    def __init__(self, config: ModelConfig, compression: CompressionConfig, *, rate: int) -> None:
        index = compression.index
        super().__init__(config, index.head_dim, rate=rate, overlaps=True)
        self._head_dim = index.head_dim
        self._scale = (index.head_dim * index.num_heads) ** -0.5
        self.q_b_proj = MergedColumnParallelLinear(
            compression.q_lora_rank, [index.num_heads * index.head_dim], bias=False, group=SINGLE
        )
        self.weights_proj = MergedColumnParallelLinear(
            config.hidden_size, [index.num_heads], bias=False, group=SINGLE
        )

    def queries(
        self, hidden: torch.Tensor, compressed_q: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries, [T, J, I], and float32 weights of their heads, [T, J].

        compressed_q: [T, q_lora_rank], normalised.
        """
        q = self.q_b_proj(compressed_q).view(len(hidden), -1, self._head_dim)
        weights = self.weights_proj(hidden).float() * self._scale
        return turn_pairs(q, *rotation.pairs), weights
