"""The decoder-only transformer around its attention: what all model files put together."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config import ModelConfig
from models.layers.activation import SiluAndMul
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.parallel.group import ParallelGroup

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and signed sine of the step's positions, each [T, 1, D]."""


class GatedMLP(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=bias, group=group
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias, group=group)
        self.act_fn = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(hidden)))
        return output


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    The sum of a sub-layer is left to the next norm, which fuses it: a layer takes and returns the
    last sub-layer's output and the residual stream apart.
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps (hidden, residual), each [T, hidden], to the next pair; no residual comes first."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, rotation)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[DecoderLayer], group: ParallelGroup
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=group
        )
        self.rotary = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] token ids at [T] positions to [T, hidden]."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        rotation = self.rotary(positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, rotation)
        assert residual is not None, "a decoder has at least one layer"
        return self.norm.add(hidden, residual)[0]


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class CausalLM(nn.Module):
    """A language model: a decoder and a head over its vocabulary.

    Must run inside `models.forward_context.forward_context`. Model files subclass it and hand it
    their layers.
    """

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    """Our module name -> the checkpoint's modules packed into it, in order of shard id."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[DecoderLayer], group: ParallelGroup
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, group)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group=group)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids at [T] int64 positions to [T, hidden]."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab], of the hidden states' dtype."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
