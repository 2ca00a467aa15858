"""Models with a recurrent state, for random checkpoints: class, configuration and its changes."""

from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": ROPE,
}
DELTA_NET_ODD = {
    **DELTA_NET,
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    "tie_word_embeddings": True,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
STATE_VARIANTS = {
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {**DELTA_NET, **EXPERTS}),
    "qwen3_next_odd": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**DELTA_NET_ODD, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA_NET),
    "qwen3_5_odd": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA_NET_ODD),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**DELTA_NET, **EXPERTS}),
    "qwen3_5_moe_odd": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {**DELTA_NET_ODD, **EXPERTS, "num_experts": 7},
    ),
}
