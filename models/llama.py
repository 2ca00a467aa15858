"""Llama: grouped-query attention with rotary positions, gated feed-forward, RMSNorm.

Also Mistral and Qwen2, with sliding windows; InternLM 3, Seed-OSS and ERNIE 4.5, with other biases;
and SmolLM3, some of whose layers have no positions.
Source: Touvron et al. 2023, "LLaMA"; Dubey et al. 2024, "The Llama 3 Herd of Models".
"""

from models.config import ModelConfig
from models.layers.decoder import CausalLM, DecoderLayer, GatedMLP
from models.layers.pipeline import make_layers
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class LlamaForCausalLM(CausalLM):
    """Llama with its language-model head."""

    def __init__(self, config: ModelConfig, group: ParallelGroup = SINGLE) -> None:
        super().__init__(
            config,
            make_layers(
                config,
                group,
                lambda index: DecoderLayer(
                    config, SelfAttention(config, index, group), GatedMLP(config, group)
                ),
            ),
            group,
        )
