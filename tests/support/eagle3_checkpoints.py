"""Tiny random EAGLE-3 heads in the form that the field publishes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

DRAFT_VOCAB_SIZE = 80


def write_eagle3_head(folder: Path, target: Path, *, agrees: bool = True, **overrides) -> None:
    """Writes a head for the checkpoint in `target`.

    agrees: its layer adds next to nothing to the last state that it reads.
    """
    model = json.loads((target / "config.json").read_text())
    model = model.get("text_config", model)
    hidden, vocab_size = model["hidden_size"], model["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab_size,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **overrides,
    }
    inner = config["intermediate_size"]
    num_queries = config["num_attention_heads"] * config["head_dim"]
    num_keys = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, 0.05 if agrees else 0.4, generator=generator)

    # Guess i is token i + d2t[i]: every vocabulary's first tokens are left out.
    shift = vocab_size - DRAFT_VOCAB_SIZE
    tensors = {
        "fc.weight": draw(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": draw(num_queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(num_keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(num_keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, num_queries),
        "midlayer.mlp.gate_proj.weight": draw(inner, hidden),
        "midlayer.mlp.up_proj.weight": draw(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, inner),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(DRAFT_VOCAB_SIZE, hidden),
        "d2t": torch.full((DRAFT_VOCAB_SIZE,), shift),
        "t2d": torch.arange(vocab_size) >= shift,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
