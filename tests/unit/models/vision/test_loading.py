"""Which parts of a model with an encoder of images are loaded, and from which names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from tests.support.image_prompts import random_picture
from tests.support.quantized_checkpoints import quantize_checkpoint
from tests.support.vision_variants import write_vision_checkpoint

GRID = (4, 6)


@pytest.fixture
def folder(tmp_path):
    write_vision_checkpoint(tmp_path, "qwen3_vl")
    return tmp_path


def load(folder, **options):
    options = {"dtype": torch.float32, "sees_images": True, **options}
    return load_model(folder, device=torch.device("cpu"), **options)


def vectors(model):
    with torch.inference_mode():
        return model.visual(random_picture(model, GRID).patches, [GRID])


def change_config(folder, section=None, **fields):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    (config[section] if section else config).update(fields)
    file.write_text(json.dumps(config))


def test_towers_are_left_out_by_default(folder):
    model = load(folder, sees_images=False)
    assert model.visual is None
    assert model.config.vision is None
    assert not model.config.rope.axes
    assert not any(name.startswith("visual.") for name, _ in model.named_parameters())


def test_the_text_of_gemma4_has_its_embeddings_for_each_layer(tmp_path):
    write_vision_checkpoint(tmp_path, "gemma4_odd")
    text, whole = load(tmp_path, sees_images=False), load(tmp_path)
    found = dict(text.named_parameters())
    expected = {
        name: each for name, each in whole.named_parameters() if not name.startswith("visual.")
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_names_of_the_first_files_are_read(folder):
    expected = vectors(load(folder))
    weights = load_file(folder / "model.safetensors")
    named = {name.replace("model.visual.", "visual."): x for name, x in weights.items()}
    save_file(named, folder / "model.safetensors")
    assert named.keys() != weights.keys()
    assert torch.equal(vectors(load(folder)), expected)


def test_a_missing_part_is_reported(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.visual.merger.linear_fc1.bias"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"visual\.merger\.mlp\.fc1\.bias"):
        load(folder)
    load(folder, sees_images=False)


def test_towers_stay_as_stored_where_the_text_is_rounded_to_fp8(folder):
    expected = vectors(load(folder))
    model = load(folder, rounds_to_fp8=True)
    assert torch.equal(vectors(model), expected)


@pytest.mark.parametrize("keep_quantized", [True, False])
def test_towers_are_dequantised_where_they_are_stored_in_fp8(tmp_path, keep_quantized):
    stored, folder, plain = (tmp_path / name for name in ("stored", "fp8", "plain"))
    write_vision_checkpoint(stored, "mistral3")
    folder.mkdir()
    tensors = quantize_checkpoint(stored, folder, "deepseek")
    shutil.copytree(stored, plain)
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    found, expected = load(folder, keep_quantized=keep_quantized), load(plain)
    assert found.visual.vision_tower.layers[0].attention.q_proj.weight.dtype == torch.float32
    assert torch.equal(vectors(found), vectors(expected))
    assert not torch.equal(vectors(found), vectors(load(stored)))


def test_dummy_weights_give_finite_vectors(folder):
    found = vectors(load(folder, load_format="dummy"))
    assert found.isfinite().all()
    assert found.std() > 0


def test_vectors_have_the_dtype_of_the_model(folder):
    exact, rounded = vectors(load(folder)), vectors(load(folder, dtype=torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().mean() <= 0.05 * exact.abs().mean()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("preprocessor_config.json", None),
        ("preprocessor_config.json", "media_proc_cfg"),
        ("processor_config.json", "image_processor"),
    ],
)
def test_colours_are_scaled_as_the_processor_says(folder, name, part):
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01}
    if part is not None:
        settings = {part: settings}
    (folder / name).write_text(json.dumps(settings))
    colours = ModelConfig.from_folder(folder, sees_images=True).vision.colours
    assert (colours.mean, colours.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert colours.factor == 0.01


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("vision_config", {"hidden_act": "relu"}, "vision_config.hidden_act is 'relu'"),
        (
            "vision_config",
            {"hidden_size": 30},
            "num_heads is 2; it must be a number of heads that share 30 in 4s",
        ),
        ("vision_config", {"num_position_embeddings": 35}, "35; it must be a square"),
        ("vision_config", {"deepstack_visual_indexes": [3, 1]}, "rising numbers below 4"),
        ("vision_config", {"deepstack_visual_indexes": [1, 4]}, "rising numbers below 4"),
        (None, {"image_token_id": "x"}, "image_token_id is 'x'"),
    ],
)
def test_unsupported_towers_are_refused_by_field(folder, section, fields, message):
    change_config(folder, section, **fields)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(folder, sees_images=True)
    assert ModelConfig.from_folder(folder).vision is None


def test_kimis_published_names_are_those_of_transformers(tmp_path):
    write_vision_checkpoint(tmp_path, "kimi_odd")
    expected = vectors_of_kimi(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    tower = config["vision_config"]
    names = {
        "hidden_size": "vt_hidden_size",
        "intermediate_size": "vt_intermediate_size",
        "num_attention_heads": "vt_num_attention_heads",
        "num_hidden_layers": "vt_num_hidden_layers",
        "pos_emb_height": "init_pos_emb_height",
        "pos_emb_width": "init_pos_emb_width",
    }
    config["vision_config"] = {names.get(name, name): each for name, each in tower.items()}
    config["vision_config"]["projector_ln_eps"] = config.pop("projection_layer_norm_eps")
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    file.write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.removeprefix("model.").replace("model.blocks.", "model.layers."): each
        for name, each in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    assert torch.equal(vectors_of_kimi(tmp_path), expected)


@pytest.mark.families
def test_minimax_m3s_published_names_are_those_of_transformers(tmp_path):
    reference = write_vision_checkpoint(tmp_path, "minimax_m3")
    expected = vectors(load(tmp_path))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    assert torch.equal(vectors(load(tmp_path)), expected)


def test_patches_that_no_encoder_has_are_refused(folder):
    change_config(folder, "vision_config", patch_size=2**11)
    with pytest.raises(ConfigError, match="patch_size is 2048; it must be at most 1024"):
        ModelConfig.from_folder(folder, sees_images=True)


@pytest.mark.families
def test_hy4s_fields_have_other_names_too(tmp_path):
    write_vision_checkpoint(tmp_path, "hy_v4")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    tower = config["vision_config"]
    del tower["num_attention_heads"], tower["rms_norm_eps"]
    tower |= {"attention_heads": 3, "layer_norm_eps": 1e-3}
    file.write_text(json.dumps(config))
    vision = ModelConfig.from_folder(tmp_path, sees_images=True).vision
    assert (vision.num_heads, vision.norm_eps) == (3, 1e-3)


@pytest.mark.parametrize("sides", [[2.0, 2.0], [True, True], [2, 3], [5, 5], 2, None])
def test_kimi_joins_squares_of_a_small_side(tmp_path, sides):
    write_vision_checkpoint(tmp_path, "kimi")
    change_config(tmp_path, "vision_config", merge_kernel_size=sides)
    with pytest.raises(ConfigError, match="it must be one small number twice"):
        ModelConfig.from_folder(tmp_path, sees_images=True)


def vectors_of_kimi(folder):
    model = load(folder)
    with torch.inference_mode():
        return model.visual(random_picture(model, (3, 6)).patches, [(3, 6)])
