"""Models with a recurrent state, for random checkpoints: class, configuration and its changes."""

import transformers
from packaging.version import Version

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
# transformers before 5.23 repeats groups where heads of Mamba2 and GraniteMoeHybrid share them.
NUM_GROUPS = 2 if Version(transformers.__version__) >= Version("5.23") else 1
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE = {
    **MAMBA2,
    "mamba_n_groups": NUM_GROUPS,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
}
FALCON = {
    **MAMBA2,
    "mamba_d_ssm": 64,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "embedding_multiplier": 5.0,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.9, 0.7],
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.7],
    "ssm_out_multiplier": 0.6,
}
LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_multiple_of": 8,
}
NEMOTRON = {
    "head_dim": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 6,
}
KIMI = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
}
_VARIANTS = {
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**KIMI, "linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "kimi_linear_odd": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **KIMI,
            "linear_num_heads": 3,
            "linear_head_dim": 7,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {**KIMI, "head_dim": 8, "n_group": 4, "topk_group": 2},
    ),
    "bailing_hybrid_odd": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {
            **KIMI,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 6,
            "short_conv_kernel_size": 3,
            "kda_safe_gate": False,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 5,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.7,
            "full_attn_alpha_factor": 1.3,
            "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.9,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "minimax_odd": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "block_size": 16,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE),
    "granite_hybrid_odd": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": (0.1, 0.9),
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**GRANITE, "num_local_experts": 0, "layer_types": ["full_attention"] * 4},
    ),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", FALCON),
    "falcon_h1_odd": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            **FALCON,
            "mamba_rms_norm": False,
            "mamba_n_groups": 1,
            "mamba_d_ssm": 40,
            "mamba_n_heads": 5,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": NUM_GROUPS},
    ),
    "mamba2_odd": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 35,
            "num_heads": 5,
            "head_dim": 14,
            "state_size": 5,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", LFM2),
    "lfm2_odd": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            **LFM2,
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **LFM2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", NEMOTRON),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "nemotron_h_odd": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NEMOTRON,
            "head_dim": 10,
            "mamba_num_heads": 5,
            "mamba_head_dim": 6,
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    # transformers stores three equal parts of a convolution, whatever their sizes are.
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,
        },
    ),
    "olmo_hybrid_odd": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 3,
            "pad_token_id": 0,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_value_head_dim": 6,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": None,
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**DELTA_NET, **EXPERTS}),
    "qwen3_next_odd": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**DELTA_NET_ODD, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA_NET),
    "qwen3_5_odd": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA_NET_ODD),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**DELTA_NET, **EXPERTS}),
    "qwen3_5_moe_odd": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**DELTA_NET_ODD, **EXPERTS, "num_experts": 7},
    ),
}

STATE_VARIANTS = {
    name: (getattr(transformers, model), getattr(transformers, config), changes)
    for name, (model, config, changes) in _VARIANTS.items()
    if hasattr(transformers, model)
}
"""Variants whose modules the installed release of transformers has."""
