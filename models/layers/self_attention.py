"""Self-attention with its projections, as Llama and its relatives have it."""

import torch

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.linear import QKVParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.stream import Stream, StreamLayer
from models.parallel.group import ParallelGroup


class SelfAttention(StreamLayer):
    """Grouped-query self-attention with rotary positions.

    Args:
        config: the model's.
        layer_index: which layer's cache it uses.
        group: the ranks that share the heads.
        has_head_norms: whether each query and key head is normalised before it is rotated.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        has_head_norms: bool = False,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            group=group,
        )
        if has_head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self._has_head_norms = has_head_norms
        self.attn = Attention(layer_index)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            group=group,
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        heads = self.qkv_proj.forward_heads(hidden)
        output: torch.Tensor = self.o_proj(self._attend(heads, rotation))
        return output

    def forward_stream(self, stream: Stream, norm: RMSNorm, rotation: Rotation) -> Stream:
        """Adds the layer's output of the normalised stream to the stream."""
        projected, total = self.qkv_proj.forward_normed(stream, norm)
        heads = self.qkv_proj.split_heads(projected)
        return self.o_proj.add_to(total, self._attend(heads, rotation))

    def _attend(
        self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rotation: Rotation
    ) -> torch.Tensor:
        """Maps q [T, Hq, D], k and v [T, Hk, D] to what the queries attend to: [T, Hq * D]."""
        q, k, v = heads
        norms = (self.q_norm, self.k_norm) if self._has_head_norms else None
        attended: torch.Tensor = self.attn(q, k, v, rotation=rotation, norms=norms)
        return attended
