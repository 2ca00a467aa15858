"""The text part of a checkpoint that also has a part for images."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.loading.loader import load_model
from models.loading.model_config import read_model_config
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint
from tests.support.recent_variants import GROWING_ROPE

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60]
# Releases before and after transformers 4.52.
NAMES = [
    ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector."),
    ("model.language_model.", "model.vision_tower.vision_model.", "model.multi_modal_projector."),
]


@pytest.mark.parametrize(("text", "vision", "projector"), NAMES)
def test_text_is_served_and_images_are_passed_over(tmp_path, text, vision, projector):
    reference = write_checkpoint(tmp_path, "gemma3")
    weights = load_file(tmp_path / "model.safetensors")
    named = {text + name.removeprefix("model."): x for name, x in weights.items()}
    named[vision + "encoder.layers.0.self_attn.q_proj.weight"] = torch.randn(6, 6)
    # A part that is not served may be quantised in any way.
    named[vision + "encoder.layers.0.mlp.fc1.weight_packed"] = torch.ones(6, 6, dtype=torch.int32)
    named[projector + "mm_input_projection_weight"] = torch.randn(6, 6)
    save_file(named, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"hidden_size": 6},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model)
    expected = transformers_logits(reference, TOKENS)
    logits = runner.run(runner.add(TOKENS), 4)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
M_ROPE = SHAPE | {"rope_parameters": SECTIONS}
HYBRID = SHAPE | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": SECTIONS | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14, "hidden_size": 16,
               "intermediate_size": 24, "out_hidden_size": 32}  # fmt: skip
GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
HALF_M_ROPE = SHAPE | {
    "pad_token_id": 0,
    "rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
}
LATENT = {
    **{name: size for name, size in SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
CLIP = VISION | {"model_type": "clip_vision_model"}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
WHOLE = {
    "Mistral3": (SHAPE | {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}, {}),
    "Llava": (SHAPE | {"model_type": "llama"}, CLIP, {}),
    "LlavaNext": (SHAPE | {"model_type": "mistral"}, CLIP, {}),
    "LlavaOnevision": (SHAPE | {"model_type": "qwen2"}, SIGLIP, {}),
    "InternVL": (SHAPE | {"model_type": "qwen2"}, VISION, {}),
    "Qwen2VL": (M_ROPE, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}, {}),
    "Qwen2_5_VL": (M_ROPE, QWEN_VISION, {}),
    "Qwen3VL": (
        M_ROPE | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "Qwen3_5": (HYBRID, QWEN_VISION | {"num_position_embeddings": 16}, {}),
    "Qwen3_5Moe": (
        HYBRID | EXPERTS | {"model_type": "qwen3_5_moe_text"},
        QWEN_VISION | {"num_position_embeddings": 16},
        {"tie_word_embeddings": True},
    ),
    "Gemma3": (SHAPE | {"layer_types": ["sliding_attention", "full_attention"]}, SIGLIP, {}),
    "Mistral3 of ministral3": (
        SHAPE | {"model_type": "ministral3", "rope_parameters": GROWING_ROPE},
        VISION | {"model_type": "pixtral"},
        {},
    ),
    "Mistral3 of mistral4": (
        LATENT | {"model_type": "mistral4", "rope_parameters": GROWING_ROPE},
        VISION | {"model_type": "pixtral"},
        {},
    ),
    "Llama4": (
        SHAPE
        | {
            "intermediate_size_mlp": 40,
            "num_local_experts": 3,
            "attention_chunk_size": 4,
            "interleave_moe_layer_step": 2,
        },
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "Kimi_K25": (
        LATENT | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
        VISION | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
        {"tie_word_embeddings": False},
    ),
    "Qwen3VLMoe": (
        M_ROPE | {name: EXPERTS[name] for name in list(EXPERTS)[:3]},
        QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": False},
    ),
    "HYV4VL": (
        {name: size for name, size in LATENT.items() if name != "first_k_dense_replace"}
        | {
            "pad_token_id": 0,
            "eos_token_id": None,
            "num_hidden_layers": 3,
            "index_n_heads": 10,
            "index_head_dim": 12,
            "index_topk": 4,
            "hc_mult": 2,
            "rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]},
        },
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "out_hidden_size": 32,
            "max_image_size": 64,
        },
        {"tie_word_embeddings": False},
    ),
    "Glm4v": (HALF_M_ROPE, QWEN_VISION | {"image_size": 28}, {"tie_word_embeddings": False}),
    "Glm4vMoe": (
        HALF_M_ROPE | GLM_EXPERTS,
        QWEN_VISION | {"image_size": 28},
        {"tie_word_embeddings": False},
    ),
}
"""Model, and kind of its text if it has several -> fields of its text part, of its part for images,
and of the whole."""


def write_whole(folder, name):
    """Writes a random model of several parts, and returns transformers' model of it."""
    text, vision, fields = WHOLE[name]
    name, _, _ = name.partition(" ")
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(
        text_config=dict(text), vision_config=dict(vision), **fields, attn_implementation="eager"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        for each in model.parameters():
            with torch.no_grad():
                each.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    if name == "Kimi_K25":  # transformers 5.23 writes layers of the text as it does others
        file = folder / "model.safetensors"
        text = "language_model.model."
        named = {
            key.replace(f"{text}blocks.", f"{text}layers."): x for key, x in load_file(file).items()
        }
        save_file(named, file)
    # That of Llama 4 demands images in transformers 5.24.
    return model.language_model if name == "Llama4" else model


def assert_serves(folder, reference):
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model)
    expected = transformers_logits(reference, TOKENS)
    logits = runner.run(runner.add(TOKENS), 4)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", WHOLE)
def test_text_of_whole_models_has_the_logits_of_transformers(tmp_path, name):
    assert_serves(tmp_path, write_whole(tmp_path, name))


OLD, NEW = "language_model.model.", "model.language_model."


@pytest.mark.parametrize(("name", "prefix"), [("Mistral3", NEW), ("Qwen3VL", NEW), ("Llava", OLD)])
def test_names_of_both_layouts_are_read(tmp_path, name, prefix):
    reference = write_whole(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    other = OLD if prefix == NEW else NEW
    named = {key.replace(other, prefix): values for key, values in weights.items()}
    if prefix == NEW:
        named = {key.replace("language_model.lm_head.", "lm_head."): x for key, x in named.items()}
    save_file(named, tmp_path / "model.safetensors")
    assert any(key.startswith(prefix) for key in named)
    assert_serves(tmp_path, reference)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"])
def test_a_part_without_a_base_of_its_rotation_has_that_of_transformers(tmp_path, name):
    write_whole(tmp_path, name)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["text_config"]["rope_parameters"]
    file.write_text(json.dumps(config))
    section = getattr(transformers, f"{name}TextConfig")()
    assert read_model_config(tmp_path, "octavo").rope.theta == section.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_first_files_of_qwen_have_no_section_for_text(tmp_path, name):
    reference = write_whole(tmp_path, name)
    weights = load_file(tmp_path / "model.safetensors")
    named = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): values
        for key, values in weights.items()
    }
    save_file(named, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    for field in ("model_type", "rope_parameters", "architectures"):
        text.pop(field, None)
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    config |= text | {"rope_theta": 1e6, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_serves(tmp_path, reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is None; it must be an object"),
        ({"text_config": [1]}, r"text_config is \[1\]; it must be an object"),
        (
            {"text_config": SHAPE | {"model_type": "gemma3n_text"}},
            "Mistral3ForConditionalGeneration holds text of model_type 'gemma3n_text', which no",
        ),
        ({"text_config": SHAPE | {"model_type": True}}, "model_type True, which no class here"),
        ({"text_config": SHAPE | {"model_type": [1]}}, r"model_type \[1\], which no class here"),
        (
            {
                "architectures": ["Step3p7ForConditionalGeneration"],
                "text_config": SHAPE | {"model_type": "step3p7_text"},
            },
            "Step3p7ForConditionalGeneration holds text of model_type 'step3p7_text', which is not "
            "served; the text part is served of .* Mistral3For",
        ),
    ],
)
def test_a_part_that_no_class_runs_is_refused_by_name(tmp_path, changes, message):
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(whole | changes))
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path, "auto")


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False)],
)
def test_the_whole_model_says_whether_its_head_is_tied(tmp_path, whole, part, tied):
    text = SHAPE | {"rms_norm_eps": 1e-6, "tie_word_embeddings": part}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": whole}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.tie_word_embeddings is tied
    assert config.architecture == "MistralForCausalLM"
