"""Tiny random checkpoints written by transformers, the numeric truth of model tests."""

import copy
from pathlib import Path

import pytest
import torch

from tests.support.dense_variants import DENSE_VARIANTS
from tests.support.expert_variants import EXPERT_VARIANTS
from tests.support.recent_variants import RECENT_VARIANTS
from tests.support.state_variants import STATE_VARIANTS

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VARIANTS = {
    name: row
    for name, row in (DENSE_VARIANTS | EXPERT_VARIANTS | STATE_VARIANTS | RECENT_VARIANTS).items()
    if None not in row[:2]
}

_WITH_NORMS_FROM_ONE = ("gemma2", "gemma3", "qwen3_next", "qwen3_5", "minimax_m3")
"""Beginnings of model types that add one to the weights of norms."""

_OF_EACH_KIND = {
    *("llama_bias", "llama_odd_heads", "internlm3", "mistral_window", "qwen2_windows", "qwen3"),
    *("phi3_partial_rotary", "phi3_long", "gemma2", "gemma3_odd", "granite_tied_bias", "olmo2_odd"),
    *("olmo3", "exaone4", "smollm3_odd", "ernie4_5_bias", "seed_oss_odd"),
    *("mixtral_window", "qwen2_moe_some_dense", "qwen3_moe_odd", "gpt_oss", "glm4_moe_groups"),
    *("deepseek_v2_groups", "deepseek_v3", "deepseek_v3_plain_queries", "deepseek_v32"),
    *("qwen3_next", "qwen3_5_odd", "granite_hybrid", "lfm2_odd", "kimi_linear_odd", "minimax"),
    *("falcon_h1_odd", "nemotron_h", "gemma4_moe", "gemma4_shared", "apertus", "cohere2_odd"),
    *("glm_moe_dsa_shared", "minimax_m2", "minimax_m3", "ministral3_odd"),
    *("deepseek_v4", "hy_v4", "llama4"),
}
"""Variants that have, together, every kind of layer, rotation, window and weight."""
EVERY_VARIANT = [
    name if name in _OF_EACH_KIND else pytest.param(name, marks=pytest.mark.families)
    for name in sorted(VARIANTS)
]
"""Parameters of a test of all variants; most of them run with `scripts/test --families`."""


def write_checkpoint(folder: Path, variant: str, **overrides):
    """Writes a variant's checkpoint, all weights random, and returns transformers' model of it."""
    model_class, config_class, changes = VARIANTS[variant]
    config = config_class(
        # Configurations change the rotary parameters that they are given.
        **copy.deepcopy({**SHAPE, **changes, **overrides}),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(variant.encode()))
        model = model_class(config).eval()
        for name, param in model.named_parameters():
            # Norms near one and biases off zero, or leaving them out would go unnoticed.
            adds_one = config.model_type.startswith(_WITH_NORMS_FROM_ONE)
            is_norm = name.endswith("norm.weight")
            is_of_one = is_norm and (not adds_one or name.endswith("linear_attn.norm.weight"))
            center = 1.0 if is_of_one else 0.0
            with torch.no_grad():
                param.normal_(center, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.3)
            elif name.endswith("tid2eid"):
                choices = torch.rand(len(buffer), config.n_routed_experts)
                buffer.copy_(choices.topk(buffer.shape[1]).indices)
    for module in model.modules():
        if hasattr(module, "limit"):  # older releases ignore the configuration
            module.limit = config.swiglu_limit
    model.save_pretrained(folder)
    return model


def transformers_logits(model, token_ids: list[int]) -> torch.Tensor:
    """Returns transformers' logits of a whole sequence at once, [length, vocab] float32."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()
