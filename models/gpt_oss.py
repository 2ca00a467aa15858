"""gpt-oss: experts with biases and a clamped gate; every other layer has a sliding window.

Each head has a sink, a learned score in its softmax without a key.
Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.
"""

from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer
from models.layers.experts import Experts
from models.layers.moe import FusedMoE, moe_config
from models.layers.self_attention import SelfAttention
from models.layers.weight import ShardId, check_shape
from models.number_formats import MXFP4
from models.parallel.group import ParallelGroup


class GptOssExperts(Experts):
    """Experts whose checkpoint stores matrices transposed, and gate and up interleaved."""

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share of a tensor of all experts.

        gate_up_proj is [E, H, 2 * I] and its bias [E, 2 * I], gate at even indices and up at odd
        ones; down_proj is [E, I, H] and its bias [E, H]. MXFP4 weights and their scales are not
        transposed.
        """
        shape = self.stored_shape(param, param)
        if loaded.dim() != len(shape):
            needed = f"{len(shape)} dimensions"
            raise ValueError(f"its shape is {tuple(loaded.shape)}; the model needs {needed}")
        if param.dtype == MXFP4:
            loaded = loaded.view(MXFP4)
        elif param is self.gate_up_proj or param is self.down_proj:
            loaded = loaded.transpose(1, 2)
        down = self.down_proj, self.down_proj_bias, self.down_proj_scale
        if any(param is each for each in down):
            super().weight_loader(param, loaded, shard_id)
            return
        rows = shape[1]
        expert = shard_id[0] if isinstance(shard_id, tuple) else None
        for target, stored in self.stacked(param, loaded, expert):
            check_shape(stored, (target.shape[0], rows * self.group.size, *shape[2:]))
            own = stored.narrow(1, rows * self.group.rank, rows)
            for part in range(2):
                self.fill(param, target, own[:, part::2], part)


class GptOssForCausalLM(CausalLM):
    """gpt-oss with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".mlp.router.": ".mlp.gate."}
    expert_names = None

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, group: ParallelGroup) -> nn.Module:
        """Returns the layer of a number."""
        return _layer(config, index, group)


def _layer(config: ModelConfig, index: int, group: ParallelGroup) -> DecoderLayer:
    experts = GptOssExperts(config.hidden_size, moe_config(config), bias=True, group=group)
    return DecoderLayer(
        config,
        SelfAttention(config, index, group, has_sinks=True),
        FusedMoE(config, group, router_bias=True, experts=experts),
    )
