"""Fields of config.json that some families name otherwise."""

from models.config_sections.fields import Fields

_KIMI = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "num_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
    "num_shared_experts": "n_shared_experts",
}
_LFM2 = {
    "block_ff_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "num_dense_layers": "first_k_dense_replace",
    "tie_embedding": "tie_word_embeddings",
}
_GEMMA_4 = {"top_k_experts": "num_experts_per_tok"}
ALIASES: dict[str, dict[str, str]] = {
    "Gemma4ForCausalLM": _GEMMA_4,
    "BailingHybridForCausalLM": _KIMI,
    "GraniteMoeHybridForCausalLM": {"layers_block_type": "layer_types"},
    "Cohere2ForCausalLM": {"layer_norm_eps": "rms_norm_eps"},
    "HYV3ForCausalLM": {
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    "KimiLinearForCausalLM": _KIMI,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Llama4ForCausalLM": {
        "intermediate_size": "moe_intermediate_size",
        "intermediate_size_mlp": "intermediate_size",
    },
    "Mamba2ForCausalLM": {
        "conv_kernel": "mamba_d_conv",
        "head_dim": "mamba_d_head",
        "layer_norm_epsilon": "rms_norm_eps",
        "n_groups": "mamba_n_groups",
        "num_heads": "mamba_n_heads",
        "state_size": "mamba_d_state",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
    },
    "MiMoV2FlashForCausalLM": {
        "layernorm_epsilon": "rms_norm_eps",
        "swa_rope_theta": "rope_local_base_freq",
    },
    "NemotronHForCausalLM": {
        "conv_kernel": "mamba_d_conv",
        "layer_norm_epsilon": "rms_norm_eps",
        "layers_block_type": "layer_types",
        "mamba_head_dim": "mamba_d_head",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
        "n_groups": "mamba_n_groups",
        "norm_eps": "rms_norm_eps",
        "ssm_state_size": "mamba_d_state",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
    },
}
"""Class -> a field's name in its files -> the name that readers know."""


def with_common_names(fields: Fields) -> Fields:
    """Returns the fields under the names that readers know."""
    names = ALIASES.get(fields.architecture(), {})
    values = {names.get(name, name): value for name, value in fields.values.items()}
    return Fields(fields.file, values, fields.prefix)
