"""Tiny random checkpoints written by transformers, the numeric truth of model tests."""

import copy
from pathlib import Path

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# Older releases that we support do not know these; their rows are then left out.
DeepseekV32Config = getattr(transformers, "DeepseekV32Config", None)
DeepseekV32ForCausalLM = getattr(transformers, "DeepseekV32ForCausalLM", None)
InternLM3Config = getattr(transformers, "InternLM3Config", None)

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
QWEN3_MOE = {
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}
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
DEEPSEEK_V3 = {**DEEPSEEK_V2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 0.7}
VARIANTS = {
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
VARIANTS = {name: row for name, row in VARIANTS.items() if None not in row[:2]}


def write_checkpoint(folder: Path, variant: str, **overrides):
    """Writes a variant's checkpoint, all weights random, and returns transformers' model of it."""
    model_class, config_class, changes = VARIANTS[variant]
    config = config_class(
        # Configurations change the rotary parameters that they are given.
        **copy.deepcopy({**SHAPE, **changes, **overrides}),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(variant.encode()))
        model = model_class(config).eval()
        for name, param in model.named_parameters():
            # Norms near one and biases off zero, or leaving them out would go unnoticed.
            has_norm_of_one = not config.model_type.startswith("gemma")
            center = 1.0 if has_norm_of_one and name.endswith("norm.weight") else 0.0
            with torch.no_grad():
                param.normal_(center, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.3)
    for module in model.modules():
        if hasattr(module, "limit"):  # older releases ignore the configuration
            module.limit = config.swiglu_limit
    model.save_pretrained(folder)
    return model


def transformers_logits(model, token_ids: list[int]) -> torch.Tensor:
    """Returns transformers' logits of a whole sequence at once, [length, vocab] float32."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()
