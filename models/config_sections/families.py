"""Facts of each family that its config.json may leave out."""

from typing import Any

DRAFTING_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families whose draft layers models.deepseek_mtp can build."""

OWN_ARCHITECTURES = (
    "ApertusForCausalLM",
    "BailingHybridForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HYV3ForCausalLM",
    "InternLM3ForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "Mistral4ForCausalLM",
    "MistralForCausalLM",
    "MistralLarge3ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoHybridForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
)
"""The keys of models.registry.ARCHITECTURES, for code that must not import torch."""

_DEEPSEEK_V3 = {
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

_MISTRAL_4 = {"norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_interleave": True}

_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_3 = {
    **_GEMMA,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_GEMMA_4 = {
    **_GEMMA,
    "vocab_size": 262_144,
    "max_position_embeddings": 131_072,
    "norm_topk_prob": True,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
_LFM2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True}
_QWEN_STATES = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "mtp_num_hidden_layers": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "Cohere2ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    "Ernie4_5ForCausalLM": {
        "head_dim": 128,
        "rope_interleave": True,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "Exaone4ForCausalLM": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "FalconH1ForCausalLM": {"rms_norm_eps": 1e-5},
    "GraniteMoeHybridForCausalLM": {
        "norm_topk_prob": True,
        "mamba_d_state": 256,
        "shared_intermediate_size": 1024,
    },
    "BailingHybridForCausalLM": {
        "first_k_dense_replace": 2,
        "head_dim": 128,
        "layer_group_size": 6,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_theta": 6e6,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
    },
    "KimiLinearForCausalLM": {
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
        "scoring_func": "sigmoid",
    },
    "MiniMaxForCausalLM": {"norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Llama4ForCausalLM": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "n_shared_experts": 1,
        "no_rope_layer_interval": 4,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
    },
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": {
        **_LFM2,
        "first_k_dense_replace": 2,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
    "Mamba2ForCausalLM": {
        # It has neither attention nor feed-forward layers, and no limit of positions.
        "num_attention_heads": 1,
        "head_dim": 2,
        "intermediate_size": 1,
        "max_position_embeddings": 2**21,
        "mamba_d_head": 64,
        "mamba_n_groups": 8,
        "rms_norm_eps": 1e-5,
    },
    "NemotronHForCausalLM": {
        "head_dim": 128,
        "intermediate_size": 1,
        "mamba_d_head": 64,
        "mamba_n_groups": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "scoring_func": "sigmoid",
    },
    "OlmoHybridForCausalLM": {"full_attention_interval": 4, "rms_norm_eps": 1e-6},
    "Gemma2ForCausalLM": {**_GEMMA, "sliding_window_pattern": 2},
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4UnifiedForCausalLM": {
        **_GEMMA_4,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "Olmo3ForCausalLM": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 4096},
    "Qwen2ForCausalLM": {"qkv_bias": True, **_QWEN_WINDOWS},
    "Qwen2MoeForCausalLM": {"qkv_bias": True, "attention_out_bias": False, **_QWEN_WINDOWS},
    "Qwen3ForCausalLM": _QWEN_WINDOWS,
    "Qwen3MoeForCausalLM": {"use_sliding_window": False, "sliding_window": 4096},
    "Qwen3NextForCausalLM": _QWEN_STATES,
    "Qwen3_5ForCausalLM": _QWEN_STATES,
    "Qwen3_5MoeForCausalLM": _QWEN_STATES,
    "SeedOssForCausalLM": {"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
    "SmolLM3ForCausalLM": {
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "MixtralForCausalLM": {"norm_topk_prob": True, "rope_theta": 1e6},
    "GptOssForCausalLM": {
        "torch_dtype": "bfloat16",
        "norm_topk_prob": True,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "Glm4MoeForCausalLM": {
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "attention_out_bias": False,
    },
    "DeepseekV2ForCausalLM": {"rope_interleave": True, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": {
        **_DEEPSEEK_V3,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    "GlmMoeDsaForCausalLM": {**_DEEPSEEK_V3, "first_k_dense_replace": 3, "rms_norm_eps": 1e-5},
    "Glm4ForCausalLM": {
        "attention_bias": True,
        "attention_out_bias": False,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
    },
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "routed_scaling_factor": 2.826,
        "scoring_func": "sigmoid",
    },
    "MiniMaxM2ForCausalLM": {
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "scoring_func": "sigmoid",
    },
    "Mistral4ForCausalLM": _MISTRAL_4,
    "MistralLarge3ForCausalLM": _MISTRAL_4,
    "Qwen3VLMoeForCausalLM": {
        "norm_topk_prob": True,
        "rope_theta": 500_000.0,
        "use_sliding_window": False,
    },
    "SolarOpenForCausalLM": {
        "attention_out_bias": False,
        "head_dim": 128,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "scoring_func": "sigmoid",
    },
}
"""Values of absent config.json fields, by model class."""

FAMILIES_WITH_NORMS_FROM_ONE = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families besides Gemma that add one to the stored weights of norms."""

FAMILIES_WITH_STATES = (
    *FAMILIES_WITH_NORMS_FROM_ONE,
    "BailingHybridForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MiniMaxForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
)
"""Families some of whose layers keep a state that is not keys and values."""

FAMILIES_WITH_CHUNKS = ("Llama4ForCausalLM",)
"""Families whose rotated layers attend within chunks of positions."""

FAMILIES_WITHOUT_POSITIONS = ("KimiLinearForCausalLM", "NemotronHForCausalLM")
"""Families whose attention does not rotate queries and keys."""

FAMILIES_WITHOUT_WINDOWS = (
    *FAMILIES_WITH_STATES,
    "ApertusForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GraniteForCausalLM",
    "HYV3ForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Mistral4ForCausalLM",
    "MistralLarge3ForCausalLM",
    "Olmo2ForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
)
"""Families that see all keys though config.json has a sliding_window, as converted files may."""
