"""Tiny random checkpoints written by transformers, the numeric truth of model tests."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
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
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_odd_heads": (
        LlamaForCausalLM,
        LlamaConfig,
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6},
    ),
    "llama_no_grouping": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama_one_kv_head": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_llama3_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR_ROPE}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
    "qwen3_tied_bias": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
}


def write_checkpoint(folder: Path, variant: str, **overrides):
    """Writes a variant's checkpoint, all weights random, and returns transformers' model of it."""
    model_class, config_class, changes = VARIANTS[variant]
    config = config_class(**{**SHAPE, **changes, **overrides}, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(sum(variant.encode()))
        model = model_class(config).eval()
        for name, param in model.named_parameters():
            # Norms near one and biases off zero, or leaving them out would go unnoticed.
            center = 1.0 if name.endswith("norm.weight") else 0.0
            with torch.no_grad():
                param.normal_(center, 0.3)
    model.save_pretrained(folder)
    return model


def transformers_logits(model, token_ids: list[int]) -> torch.Tensor:
    """Returns transformers' logits of a whole sequence at once, [length, vocab] float32."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()
