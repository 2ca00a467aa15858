"""Self-attention whose output a gate of each head's elements scales."""

import torch

from models.config import ModelConfig
from models.layers.linear import QKVParallelLinear
from models.layers.rotary import Rotation
from models.layers.rotary_heads import head_order, reorder_heads
from models.layers.self_attention import SelfAttention
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.parallel.group import ParallelGroup


class GatedAttention(SelfAttention):
    """Self-attention with normalised heads whose queries come with gates of the output.

    Source: Qiu et al. 2025, "Gated Attention for Large Language Models".
    """

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        super().__init__(config, layer_index, group, has_head_norms=True)
        self.qkv_proj: GatedQKVLinear = GatedQKVLinear(config, group)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        q, gate, k, v = self.qkv_proj.forward_gated(hidden)
        attended = self.attended(q, k, v, rotation)
        output: torch.Tensor = self.o_proj(sigmoid_gate(attended, gate))
        return output


class GatedQKVLinear(QKVParallelLinear):
    """Projects to queries, gates of their heads' outputs, keys and values.

    A checkpoint has each head's query before its gate; here all queries come before all gates.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        num_heads = config.num_attention_heads
        super().__init__(
            config.hidden_size,
            config.head_dim,
            2 * num_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            group=group,
        )
        self.num_heads = group.split(num_heads, "attention heads")
        self._order = head_order(config.head_dim, config.rope)

    def forward_gated(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Maps [T, hidden] to q [T, Hq, D], gates [T, Hq * D], k and v [T, Hk, D]."""
        heads = self(x).view(x.shape[0], -1, self._head_dim)
        sizes = [self.num_heads, self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, gate, k, v = heads.split_with_sizes(sizes, dim=-2)
        return q, gate.flatten(1), k, v

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether no block of rows is moved in parts; see models.layers.rotary_heads."""
        del multiple
        return False

    def arranged(self, rows: torch.Tensor, shard_id: int) -> torch.Tensor:
        """Returns the rows of queries, reordered for our rotation, before those of gates."""
        if shard_id == 2:
            return rows
        if shard_id == 1:
            return reorder_heads(rows, self._order)
        q, gate = rows.view(-1, 2, self._head_dim, *rows.shape[1:]).unbind(1)
        return torch.cat((reorder_heads(q.flatten(0, 1), self._order), gate.flatten(0, 1)))
