"""Mixtures of experts, for random checkpoints: class, configuration and its changes."""

import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.dense_variants import YARN_ROPE

# Older releases that we support do not know these; their rows are then left out.
DeepseekV32Config = getattr(transformers, "DeepseekV32Config", None)
DeepseekV32ForCausalLM = getattr(transformers, "DeepseekV32ForCausalLM", None)

QWEN3_MOE = {
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}
QWEN2_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GPT_OSS = {
    "head_dim": 10,
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "sliding_window": 7,
    "swiglu_limit": 1.5,
    "rope_parameters": {**YARN_ROPE, "truncate": False},
}
GLM4_MOE = {
    "head_dim": 12,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
DEEPSEEK_V2 = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = {**DEEPSEEK_V2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
LATENT = {name: value for name, value in DEEPSEEK_V3.items() if name != "first_k_dense_replace"}
DSA = {**DEEPSEEK_V3, "index_n_heads": 10, "index_head_dim": 14, "index_topk": 7}
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 0.7}
EXPERT_VARIANTS = {
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, DEEPSEEK_V3),
    "deepseek_v3_yarn_bias": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **DEEPSEEK_V3,
            "rope_parameters": DEEPSEEK_ROPE,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3_plain_queries": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **DEEPSEEK_V3,
            "q_lora_rank": None,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v32": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        {**DEEPSEEK_V3, "index_n_heads": 8, "index_head_dim": 12, "index_topk": 6},
    ),
    "deepseek_v32_yarn_bias": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        {
            **DEEPSEEK_V3,
            "index_n_heads": 9,
            "index_head_dim": 8,
            "index_topk": 11,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {**DEEPSEEK_V2, "rope_parameters": {**DEEPSEEK_ROPE, "mscale": 0.707}},
    ),
    "deepseek_v2_groups": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **DEEPSEEK_V2,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE),
    "qwen3_moe_some_dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **QWEN3_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe_odd": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **QWEN3_MOE,
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 6,
            "num_experts": 7,
            "num_experts_per_tok": 7,
            "moe_intermediate_size": 13,
        },
    ),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, QWEN2_MOE),
    "qwen2_moe_some_dense": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            **QWEN2_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, GPT_OSS),
    "gpt_oss_plain": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            **GPT_OSS,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, GLM4_MOE),
    "glm4_moe_groups": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {
            **GLM4_MOE,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, MIXTRAL),
    "mixtral_window": (
        MixtralForCausalLM,
        MixtralConfig,
        {**MIXTRAL, "sliding_window": 7, "head_dim": 6, "num_experts_per_tok": 1},
    ),
}
