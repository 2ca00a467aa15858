"""Llama: grouped-query attention with rotary positions, gated feed-forward, RMSNorm.

Also Mistral and Qwen2, with sliding windows; InternLM 3, Seed-OSS and ERNIE 4.5, with other biases;
and SmolLM3, some of whose layers have no positions.
Source: Touvron et al. 2023, "LLaMA"; Dubey et al. 2024, "The Llama 3 Herd of Models".
"""

from models.layers.decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Llama with its language-model head."""
