"""Self-attention whose output a gate of each head's elements scales."""

import torch

from models.config import ModelConfig
from models.layers.linear import QKVParallelLinear
from models.layers.rotary import Rotation
from models.layers.rotary_heads import (
    head_order,
    keeps_blocks,
    reorder_elements,
    reorder_heads,
)
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
    """Projects to gates of the heads' outputs, queries, keys and values.

    A checkpoint has each head's query before its gate; here all gates come before all queries. Rows
    of queries and keys are reordered for our rotation, unless that would move rows between blocks
    that share a scale: then the projected heads are.
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
        num_rotated = self.num_heads + self.num_kv_heads
        sizes = [self.num_heads, num_rotated, self.num_kv_heads]
        gate, rotated, v = heads.split_with_sizes(sizes, dim=-2)
        if not self._reorders_rows:
            rotated = reorder_elements(rotated, self._order)
        q, k = rotated.split_with_sizes([self.num_heads, self.num_kv_heads], dim=-2)
        return q, gate.flatten(1), k, v

    @property
    def _reorders_rows(self) -> bool:
        return self.method.block is None or keeps_blocks(self._order, self.method.block)

    def is_split_at(self, multiple: int) -> bool:
        """Returns whether shards, projections and heads begin at multiples of `multiple`."""
        return super().is_split_at(multiple) and self._head_dim % multiple == 0

    def arranged(self, rows: torch.Tensor, shard_id: int) -> torch.Tensor:
        """Returns the rows of gates before those of queries, heads reordered for our rotation."""
        if shard_id == 0:
            gate, q = _apart(rows, self._head_dim)
            return torch.cat((gate, self._reordered(q)))
        return self._reordered(rows) if shard_id == 1 else rows

    def arranged_scales(self, scales: torch.Tensor, shard_id: int, block: int) -> torch.Tensor:
        """Returns the scales of gates before those of queries."""
        return scales if shard_id else torch.cat(_apart(scales, self._head_dim // block))

    def _reordered(self, rows: torch.Tensor) -> torch.Tensor:
        return reorder_heads(rows, self._order) if self._reorders_rows else rows


def _apart(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of gates and of queries, of which each head has `size` in turns."""
    q, gate = rows.view(-1, 2, size, *rows.shape[1:]).unbind(1)
    return gate.flatten(0, 1), q.flatten(0, 1)
