"""GGUF files of random checkpoints, written the way llama.cpp's converter does.

Names of tensors are those of the package `gguf`. Changes of values are those of llama.cpp,
convert_hf_to_gguf.py: rows of Llama's queries and keys in pairs, 1 added to Gemma's norms.
"""

import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "granite": "granite", "olmo2": "olmo2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe",
}  # fmt: skip
"""model_type of config.json -> architecture in GGUF."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_MOE_NAMES = {
    "block_sparse_moe.experts.w1": "feed_forward.experts.w1",
    "block_sparse_moe.experts.w2": "feed_forward.experts.w2",
    "block_sparse_moe.experts.w3": "feed_forward.experts.w3",
}


def write_gguf(
    folder, path, *, kind="F32", has_random_blocks=False, tokenizer=None, num_shards=1, **fields
):
    """Writes a folder's checkpoint as one file, or as shards.

    kind: type of matrices whose rows its blocks fill; the others and vectors are F32.
    has_random_blocks: matrices are random, with scales that bfloat16 has, too.
    tokenizer: fields `tokenizer.*`; by default a vocabulary of bytes.
    fields: more metadata, by keys without the architecture, with `__` for dots.
    """
    config = json.loads((folder / "config.json").read_bytes())
    architecture = ARCHITECTURES[config["model_type"]]
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in _metadata(config).items()},
        **{f"{architecture}.{k.replace('__', '.')}": value for k, value in fields.items()},
        **(tokenizer or byte_tokenizer(config["vocab_size"])),
    }
    converted = dict(_converted(tensors, config, architecture))
    converted |= _rope_tensors(config)
    names = sorted(converted)
    for shard in range(num_shards):
        extra = {"split.no": shard, "split.count": num_shards} if num_shards > 1 else {}
        content = (
            {**metadata, **extra} if shard == 0 else {**extra, "general.architecture": architecture}
        )
        of_shard = {name: converted[name] for name in names[shard::num_shards]}
        name = (
            path.name
            if num_shards == 1
            else (f"{path.stem}-{shard + 1:05}-of-{num_shards:05}.gguf")
        )
        write_tensors(
            path.with_name(name), architecture, content, of_shard, kind,
            has_random_blocks=has_random_blocks,
        )  # fmt: skip


def write_tensors(path, architecture, metadata, tensors, kind="F32", *, has_random_blocks=False):
    """Writes a file with tensors of float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, values in tensors.items():
        wanted = gguf.GGMLQuantizationType[kind]
        block, _ = gguf.GGML_QUANT_SIZES[wanted]
        is_matrix = values.ndim > 1 and values.shape[-1] % block == 0
        wanted = wanted if is_matrix else gguf.GGMLQuantizationType.F32
        stored = _quantized(values, wanted)
        if has_random_blocks and wanted.name == kind:
            stored = random_blocks(values.shape, kind, has_bfloat16_scales=True)
        writer.add_tensor(name, stored, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(shape, kind, *, seed=0, has_bfloat16_scales=False):
    """Returns bytes of random blocks, [..., bytes of a row], whose scales are small and finite."""
    wanted = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[wanted]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for start in _SCALES[kind]:
        scale = random.normal(0, 0.02, raw.shape[:-1]).astype(np.float16)
        if has_bfloat16_scales:
            scale = (scale.view(np.uint16) & 0xFFF8).view(np.float16)
        raw[..., start : start + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = random.integers(110, 125, raw.shape[:-1])
    return raw.reshape(*shape[:-1], -1)


_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Where blocks have float16."""


def transformers_llama(file):
    """Returns transformers' model of a Llama's file, with weights that `gguf` multiplies out."""
    reader = gguf.GGUFReader(file)

    def field(key):
        return reader.get_field(f"llama.{key}").contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in {each.name for each in reader.tensors},
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    values = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors
    }
    for name in values:
        if "attn_q" in name or "attn_k" in name:
            pairs = values[name].reshape(
                heads if "attn_q" in name else kv_heads, -1, 2, config.hidden_size
            )
            values[name] = pairs.swapaxes(1, 2).reshape(values[name].shape)
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        param.data = torch.from_numpy(values[names.get_name(name, (".weight",))].copy())
    return model.eval()


def byte_tokenizer(vocab_size):
    """Returns the fields of a tokenizer whose first tokens are bytes."""
    tokens = [*bytes_to_unicode().values()][: vocab_size - 1]
    tokens += [f"<|{number}|>" for number in range(vocab_size - 1 - len(tokens))]
    tokens.append(tokens[0] + tokens[1])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def _add(writer, key, value):
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _quantized(values, kind):
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:  # of K-quants and IQ4 it only reads
        return random_blocks(values.shape, kind.name)


def _metadata(config):
    """Returns the fields of an architecture."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    of_all = rope.get("full_attention", rope)
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(of_all["rope_theta"]),
    }
    partial = of_all.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    fields["rope.dimension_count"] = int(partial * head_dim)
    if of_all["rope_type"] in ("linear", "yarn", "longrope"):
        fields["rope.scaling.type"] = of_all["rope_type"]
    if of_all.get("factor") and of_all["rope_type"] != "llama3":
        fields["rope.scaling.factor"] = of_all["factor"]
    original = of_all.get("original_max_position_embeddings")
    original = config.get("original_max_position_embeddings") or original
    if original and of_all["rope_type"] in ("yarn", "longrope"):
        fields["rope.scaling.original_context_length"] = original
    if of_all["rope_type"] == "longrope":
        stretch = config["max_position_embeddings"] / original
        factor = (1 + math.log(stretch) / math.log(original)) ** 0.5 if stretch > 1 else 1.0
        fields["rope.scaling.attn_factor"] = factor
    return {**fields, **_family_fields(config, rope), **_latent_fields(config, of_all)}


def _latent_fields(config, rope):
    """Returns the fields of latent attention, whose cached entries are one head."""
    if "kv_lora_rank" not in config:
        return {}
    rope_dim = config["qk_rope_head_dim"]
    fields = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["kv_lora_rank"] + rope_dim,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope_dim,
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
    }
    if config["q_lora_rank"]:
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    if rope.get("mscale_all_dim"):
        fields["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return fields


def _family_fields(config, rope):
    """Returns the fields that single families have."""
    names = {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    fields = {key: config[name] for key, name in names.items() if config.get(name) is not None}
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    for name in counts:
        if config.get(name):
            fields["expert_count"] = config[name]
    if config["model_type"] == "gpt_oss":
        fields["expert_feed_forward_length"] = config["intermediate_size"]
    if "sliding_attention" in rope:
        fields["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    return fields


def _rope_tensors(config):
    """Returns the factors of Llama 3's and LongRoPE's pairs."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
            for name in ("short", "long")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    return {"rope_freqs.weight": (plain / inverse.double().numpy()).astype(np.float32)}


def _converted(tensors, config, architecture):
    """Yields the tensors by their names in GGUF."""
    names = gguf.get_tensor_name_map(
        next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    experts = {}
    for name, values in tensors.items():
        values = values.to(torch.float32).numpy()
        match = _EXPERT.fullmatch(name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
            continue
        if "kv_b_proj" in name or ".experts." in name or name.endswith(".sinks"):
            yield from _parts(name, values, config)
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        module = name.split(".")[-2]
        if architecture in ("llama", "granite") and module in heads:
            values = _paired(values, config[heads[module]])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        yield names.get_name(name, (".weight", ".bias")), values
    for name, parts in experts.items():
        stacked = np.stack([parts[index] for index in range(len(parts))])
        for stored, merged in _MOE_NAMES.items():
            if stored in name:
                name = name.removeprefix("model.").replace(stored, merged)
        yield names.get_name(name, (".weight", ".bias")), stacked


def _parts(name, values, config):
    """Yields the tensors that a file has for one of latent attention's or gpt-oss's."""
    block = f"blk.{name.split('.')[2]}"
    kind = "bias" if name.endswith("_bias") else "weight"
    if name.endswith(".sinks"):
        yield f"{block}.attn_sinks.weight", values
    elif "kv_b_proj" in name:
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        heads = values.reshape(config["num_attention_heads"], sum(sizes), -1)
        yield f"{block}.attn_k_b.weight", np.ascontiguousarray(heads[:, : sizes[0]].swapaxes(1, 2))
        yield f"{block}.attn_v_b.weight", np.ascontiguousarray(heads[:, sizes[0] :])
    else:
        rows = values.swapaxes(1, 2) if kind == "weight" else values
        if "down_proj" in name:
            yield f"{block}.ffn_down_exps.{kind}", np.ascontiguousarray(rows)
            return
        for place, part in enumerate(("gate", "up")):
            yield f"{block}.ffn_{part}_exps.{kind}", np.ascontiguousarray(rows[:, place::2])


def _paired(values, heads):
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
