"""OLMo 2: norms after both sub-layers instead of before, and of all heads together.

Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.3.
"""

from collections.abc import Collection

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, GatedMLP
from models.layers.norm import RMSNorm
from models.layers.pipeline import make_layers
from models.layers.projection_norm import ProjectionNorm
from models.layers.rotary import Rotation
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class Olmo2Attention(SelfAttention):
    """Self-attention whose queries, and whose keys, are normalised over all heads."""

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__(config, index, group)
        eps, head_dim = config.rms_norm_eps, config.head_dim
        self.q_norm: nn.Module = ProjectionNorm(config.num_attention_heads, head_dim, eps, group)
        self.k_norm: nn.Module = ProjectionNorm(config.num_key_value_heads, head_dim, eps, group)

    def normalized(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns normalised q [T, Hq, D] and k [T, Hk, D]."""
        return self.q_norm(q), self.k_norm(k)


class Olmo2Layer(nn.Module):
    """Attention and feed-forward, each before a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, group: ParallelGroup) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, index, group)
        self.mlp = GatedMLP(config, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps the residual stream, [T, hidden], to the one with both outputs added."""
        hidden = hidden + self.post_attention_layernorm(self.self_attn(hidden, rotation))
        output: torch.Tensor = hidden + self.post_feedforward_layernorm(self.mlp(hidden))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something between the sub-layers."""
        return ()


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2 with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(config, group, lambda index: Olmo2Layer(config, index, group)),
            group,
        )
