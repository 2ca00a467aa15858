"""Tiny random checkpoints of decoders that run as modules of transformers."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from services.engine.config.checkpoint import TINY_CHECKPOINT

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 96,
}
_GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.3}),
    "Cohere2ForCausalLM": ("Cohere2Config", {"sliding_window": 7, "num_hidden_layers": 4}),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", _GEMMA_4),
    "GPT2LMHeadModel": ("GPT2Config", _GPT2),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
    "NemotronForCausalLM": ("NemotronConfig", {}),
    "OlmoForCausalLM": ("OlmoConfig", {}),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OPTForCausalLM": (
        "OPTConfig",
        {"ffn_dim": 56, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    ),
    "PhiForCausalLM": ("PhiConfig", {}),
    "StableLmForCausalLM": ("StableLmConfig", {}),
    "Starcoder2ForCausalLM": ("Starcoder2Config", {"sliding_window": 7}),
}
"""Architecture -> its configuration's class, and sizes; `_SHAPE` has the others."""


def write_foreign_checkpoint(
    folder: Path, architecture: str, *, has_tokenizer: bool = False, **changes: Any
) -> Any:
    """Writes a random model; returns transformers' model, in eval mode.

    has_tokenizer: whether engines can serve the folder; the vocabulary is then the tokenizer's.
    """
    config_class, values = FOREIGN[architecture]
    shape = values if "n_embd" in values else {**_SHAPE, **values}
    if has_tokenizer:
        shape = {**shape, "vocab_size": 1024}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**shape, **changes})
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    if has_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY_CHECKPOINT / name, folder)
    return model


def generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the greedy continuation of transformers' own generation."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
