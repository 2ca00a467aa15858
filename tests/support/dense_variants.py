"""Models without experts, for random checkpoints: class, configuration and its changes."""

import transformers
from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

# Older releases that we support do not know these; their rows are then left out.
InternLM3Config = getattr(transformers, "InternLM3Config", None)
Ernie4_5Config = getattr(transformers, "Ernie4_5Config", None)
Ernie4_5ForCausalLM = getattr(transformers, "Ernie4_5ForCausalLM", None)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
GEMMA = {
    "head_dim": 10,
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "pad_token_id": 0,
}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.5, 3.0, 9.0],
}
DENSE_VARIANTS = {
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
    "llama_yarn_rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "llama_yarn_rope_untruncated": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {
                **YARN_ROPE,
                "truncate": False,
                "beta_fast": 8.0,
                "attention_factor": 1.3,
            }
        },
    ),
    "mistral_explicit_head": (
        MistralForCausalLM,
        MistralConfig,
        {"head_dim": 12, "sliding_window": None},
    ),
    "mistral_window": (MistralForCausalLM, MistralConfig, {"head_dim": 10, "sliding_window": 9}),
    "internlm3": (
        LlamaForCausalLM,  # transformers has no other class for it
        InternLM3Config,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
        },
    ),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 10}),
    "ernie4_5_bias": (
        Ernie4_5ForCausalLM,
        Ernie4_5Config,
        {"head_dim": 6, "use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {
            "head_dim": 12,
            "sliding_window": 7,
            "sliding_window_pattern": "LLG",
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "num_hidden_layers": 6,
        },
    ),
    "exaone4_no_windows": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2_no_caps": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **GEMMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA, "rope_parameters": GEMMA_3_ROPE}),
    "gemma3_odd": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **GEMMA,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 14,
            "num_hidden_layers": 7,
            "rope_parameters": None,
            "final_logit_softcapping": 4.0,
        },
    ),
    "granite": (GraniteForCausalLM, GraniteConfig, GRANITE),
    "granite_tied_bias": (
        GraniteForCausalLM,
        GraniteConfig,
        {
            **GRANITE,
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "olmo2_odd": (
        Olmo2ForCausalLM,
        Olmo2Config,
        {
            "hidden_size": 36,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo3_odd": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {
            "hidden_size": 36,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3_long": (
        Phi3ForCausalLM,
        Phi3Config,
        # Transformers counts as long each sequence of more than two tokens.
        {"pad_token_id": 0, "original_max_position_embeddings": 2, "rope_parameters": LONGROPE},
    ),
    "phi3_short": (
        Phi3ForCausalLM,
        Phi3Config,
        {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"pad_token_id": 0}),
    "phi3_partial_rotary": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "pad_token_id": 0,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_tied": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": 5},
    ),
    "qwen2_windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
    "qwen3_tied_bias": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3_windows": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig, {"head_dim": 12}),
    "seed_oss_odd": (
        SeedOssForCausalLM,
        SeedOssConfig,
        {
            "head_dim": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3_odd": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {
            "pad_token_id": 0,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}
