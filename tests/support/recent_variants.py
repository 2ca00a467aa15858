"""Families of 2026, for random checkpoints: class, configuration and its changes."""

import transformers

from tests.support.dense_variants import YARN_ROPE
from tests.support.expert_variants import DEEPSEEK_ROPE, DEEPSEEK_V3, DSA, LATENT
from tests.support.hyper_variants import HYPER_ROWS

HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROWING_ROPE = {
    **YARN_ROPE,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": None,
}
LLAMA_4 = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.4,
}
MIMO_V2 = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "sliding_window": 7,
    "rope_parameters": None,
}
SIGMOID_EXPERTS = {
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "head_dim": 12,
    "intermediate_size": 24,
}
_ROWS = {
    **HYPER_ROWS,
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {}),
    "apertus_odd": (
        "ApertusForCausalLM",
        "ApertusConfig",
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "rope_parameters": None,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": 7, "num_hidden_layers": 4, "logit_scale": 0.3},
    ),
    "cohere2_odd": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "gemma4_shared": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 97,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedTextConfig",
        {
            **{name: each for name, each in GEMMA_4.items() if "per_layer" not in name},
            "attention_bias": True,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "global_head_dim": 12,
            "attention_k_eq_v": True,
        },
    ),
    "glm4": (
        "Glm4ForCausalLM",
        "Glm4Config",
        {"head_dim": 8, "rope_parameters": HALF_ROPE, "pad_token_id": 0},
    ),
    "glm4_odd": (
        "Glm4ForCausalLM",
        "Glm4Config",
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT),
    "glm4_moe_lite_odd": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {
            **LATENT,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": True,
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", DSA),
    "glm_moe_dsa_shared": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {
            **DSA,
            "num_hidden_layers": 5,
            "indexer_types": ["full", "shared", "full", "shared", "shared"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "index_n_heads": 9,
            "index_topk": 11,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "hy_v3": (
        "HYV3ForCausalLM",
        "HYV3Config",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "hy_v3_odd": (
        "HYV3ForCausalLM",
        "HYV3Config",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 20,
            "router_scaling_factor": 1.5,
            "mlp_layer_types": ["sparse", "dense"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA_4),
    "llama4_odd": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **LLAMA_4,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "num_hidden_layers": 5,
            "num_local_experts": 7,
            "attention_chunk_size": 13,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1, 0],
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mimo_v2": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", MIMO_V2),
    "mimo_v2_odd": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            **MIMO_V2,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 14,
            "v_head_dim": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 13,
            "attention_bias": True,
            "attention_value_scale": 1.3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {**SIGMOID_EXPERTS, "rope_parameters": HALF_ROPE},
    ),
    "minimax_m2_odd": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {
            **SIGMOID_EXPERTS,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "num_local_experts": 7,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {"head_dim": 8, "rope_parameters": GROWING_ROPE},
    ),
    "ministral3_odd": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "sliding_window": 7,
            "rope_parameters": GROWING_ROPE | {"original_max_position_embeddings": 5},
            "tie_word_embeddings": True,
        },
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        "Mistral4Config",
        {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "rope_parameters": GROWING_ROPE},
    ),
    "mistral4_odd": (
        "Mistral4ForCausalLM",
        "Mistral4Config",
        {
            **DEEPSEEK_V3,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "rope_parameters": GROWING_ROPE | {"original_max_position_embeddings": 7},
        },
    ),
    "solar_open": (
        "SolarOpenForCausalLM",
        "SolarOpenConfig",
        {
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "solar_open_odd": (
        "SolarOpenForCausalLM",
        "SolarOpenConfig",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": YARN_ROPE,
            "tie_word_embeddings": True,
        },
    ),
}

RECENT_VARIANTS = {
    name: (getattr(transformers, model), getattr(transformers, config), changes)
    for name, (model, config, changes) in _ROWS.items()
    if hasattr(transformers, model)
}
"""Variants whose modules the installed release of transformers has."""
