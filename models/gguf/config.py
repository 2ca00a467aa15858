"""Makes config.json out of a file's metadata.

Source of the keys: github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py; of what they mean
where the two formats differ, its convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from collections.abc import Callable
from typing import Any

from models.gguf.errors import GgufError
from models.gguf.metadata import Metadata, shortest
from models.quantization.gguf import KINDS

MAX_PAIRS = 1024
"""Most pairs of a head that have factors of their own."""
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}


def model_config(metadata: Metadata) -> dict[str, Any]:
    """Returns what config.json would say.

    Raises:
        GgufError: the architecture is not supported, or a field is missing or ill-typed.
    """
    read = _READERS.get(metadata.architecture)
    if read is None:
        raise GgufError(
            f"{metadata.model.path}: architecture {metadata.architecture!r} is not supported in "
            f"GGUF; the supported ones are {', '.join(_READERS)}"
        )
    config = {**_common(metadata), **_rope(metadata), **read(metadata)}
    return {name: value for name, value in config.items() if value is not None}


def _common(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields that all architectures have."""
    heads, hidden = metadata.size("attention.head_count"), metadata.count("embedding_length")
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": metadata.count("attention.key_length", hidden // heads),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "dtype": _dtype(metadata),
        "quantization_config": _quantization(metadata),
    }


def _dtype(metadata: Metadata) -> str:
    """Returns the dtype of matrices that no block type stores; else that of computation."""
    names = {each.type.name for each in metadata.model.tensors.values() if len(each.shape) > 1}
    return _PLAIN_DTYPES.get(names.pop(), "bfloat16") if len(names) == 1 else "bfloat16"


def _quantization(metadata: Metadata) -> dict[str, Any] | None:
    """Returns the types of blocks' matrices that can stay packed; None: all are multiplied out."""
    stored = metadata.model.tensors.values()
    types = {each.type.name for each in stored if each.name.startswith("blk.")}
    kept = sorted(types.intersection(KINDS))
    return {"quant_method": "gguf", "types": kept} if kept else None


def _rope(metadata: Metadata) -> dict[str, Any]:
    """Returns the rotation; `rope_freqs` are the factors by which Llama 3 slows each pair."""
    theta = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    context = metadata.count("context_length")
    original = metadata.count("rope.scaling.original_context_length", context)
    if metadata.has("rope_freqs.weight"):
        factors = metadata.floats("rope_freqs.weight", MAX_PAIRS)
        return {**theta, "rope_scaling": _factors(factors, factors, 1.0, original)}
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "none"):
        return theta
    factor = metadata.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {**theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        return {**theta, "rope_scaling": scaling}
    if kind == "longrope":
        return theta  # its factors are tensors, which Phi-3 reads
    raise metadata.error("rope.scaling.type", kind, "none, linear, yarn or longrope")


def _factors(
    short: list[float], long: list[float], attention: float, original: int
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Llama, Mistral, and Mixtral, which llama.cpp calls llama as well."""
    num_experts = metadata.count("expert_count", 0)
    config: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM" if num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if num_experts else "llama",
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "attention_out_bias": metadata.has("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }
    if num_experts:
        config["num_local_experts"] = num_experts
        config["num_experts_per_tok"] = metadata.count("expert_used_count")
    return config


def _granite(metadata: Metadata) -> dict[str, Any]:
    return {
        **_llama(metadata),
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale"),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("attention.sliding_window") is not None:
        raise GgufError(f"{metadata.model.path}: it is OLMo 3, which is not supported in GGUF")
    return {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


def _gemma(metadata: Metadata, large_layers: int) -> dict[str, Any]:
    """Fields of Gemma 2 and 3; the largest size, known by its layers, scales scores otherwise."""
    heads, head_dim = metadata.size("attention.head_count"), metadata.count("attention.key_length")
    is_large = metadata.count("block_count") == large_layers
    scalar = metadata.count("embedding_length") / heads if is_large else head_dim
    return {
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.count("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, large_layers=46),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, large_layers=62),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_theta": metadata.number("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": metadata.count("attention.sliding_window_pattern", 6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    context = metadata.count("context_length")
    original = metadata.count("rope.scaling.original_context_length", context)
    head_dim = metadata.size("embedding_length") // metadata.size("attention.head_count") or 1
    config: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": metadata.count("attention.sliding_window", 0) or None,
        "partial_rotary_factor": metadata.count("rope.dimension_count", head_dim) / head_dim,
    }
    if metadata.has("rope_factors_long.weight"):
        short, long = (
            metadata.floats(f"rope_factors_{each}.weight", MAX_PAIRS) for each in ("short", "long")
        )
        attention = metadata.number("rope.scaling.attn_factor", 1.0)
        config["rope_scaling"] = _factors(short, long, attention, original)
    return config


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata.size("attention.key_length")
    return {
        **_many_experts(metadata),
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": metadata.count("rope.dimension_count", head_dim) / head_dim,
    }


def _many_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        # Draft layers count as blocks; they are not loaded.
        "num_hidden_layers": metadata.count("block_count")
        - metadata.count("nextn_predict_layers", 0),
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "n_shared_experts": metadata.count("expert_shared_count", 0),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "n_group": metadata.count("expert_group_count", 1) or 1,
        "topk_group": metadata.count("expert_group_used_count", 1) or 1,
    }


def _deepseek2(metadata: Metadata) -> dict[str, Any]:
    """DeepSeek V2 and V3, which score experts differently."""
    is_v3 = metadata.count("expert_gating_func", 1) == _SIGMOID
    experts = _many_experts(metadata)
    rope_dim = metadata.size("rope.dimension_count")
    # Files with kv_b_proj in two parts call the sizes of cached entries key_length, value_length.
    suffix = "" if metadata.get("attention.key_length_mla") is None else "_mla"
    head_dim = metadata.count(f"attention.key_length{suffix}")
    way = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    config = {
        **experts,
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "topk_method": "noaux_tc" if is_v3 else way,
        "num_key_value_heads": metadata.count("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": metadata.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": metadata.count(f"attention.value_length{suffix}"),
        **_rope(metadata),
    }
    weight = 10 * metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    if weight and "rope_scaling" in config:
        config["rope_scaling"] |= {"mscale": shortest(weight), "mscale_all_dim": shortest(weight)}
    return config


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "sliding_window": metadata.count("attention.sliding_window"),
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        **_rope(metadata),
    }
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"]["truncate"] = False
    return config


_SIGMOID = 2
"""Number of a way to score experts: enum llama_expert_gating_func_type of llama.cpp."""
_READERS: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}
