"""Folders for random weights of public shapes."""

import json

import pytest
import torch

from models.config import ModelConfig
from models.loading.loader import load_model
from services.engine.checkpoint.model_folder import ModelFolder
from tests.bench.model_folder import make_model_folder, read_shape, shape_names, with_depth
from tests.support.paged_runner import PagedRunner

SHAPES = [
    "deepseek-v3", "deepseek-v4-flash", "gemma-4-26b-a4b", "gemma-4-31b", "glm-4.5-air",
    "glm-5", "gpt-oss-120b", "gpt-oss-20b", "hy4", "llama-3.1-70b", "llama-3.1-70b-fp8",
    "llama-3.1-70b-w4a16", "llama-3.1-8b", "llama-3.1-8b-w4a16", "llama-3.1-8b-w8a16",
    "llama-4-scout", "mimo-v2-flash", "minimax-m2", "minimax-m3", "ministral-14b",
    "mixtral-8x7b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-30b-a3b-fp8", "qwen3-30b-a3b-int4",
    "qwen3-30b-a3b-nvfp4", "qwen3-8b", "qwen3-8b-fp8", "qwen3-8b-fp8-rows", "qwen3-vl-8b",
    "qwen3.5-35b-a3b", "qwen3.5-35b-a3b-fp8", "qwen3.5-35b-a3b-images", "qwen3.8-27b",
]  # fmt: skip


def test_shapes_are_the_public_models_and_the_embedded_one():
    assert shape_names() == ["tiny", *SHAPES]


def test_unknown_shape_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="there is no shape 'gpt-5'; there are tiny, deepseek"):
        read_shape("gpt-5")


@pytest.mark.parametrize("shape", ["tiny", "qwen3-0.6b", "gpt-oss-20b", "mixtral-8x7b"])
def test_engine_takes_the_folder_and_every_token_has_a_text(shape, tmp_path):
    folder = make_model_folder(shape, tmp_path)
    model = ModelFolder.open(folder, name=shape, max_model_len=None)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(model.vocab_size))
    assert model.default_sampling.temperature == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_fewer_layers_are_the_first_ones(shape, tmp_path):
    configs = []
    for content in (read_shape(shape), with_depth(read_shape(shape), 6)):
        (tmp_path / "config.json").write_text(json.dumps(content))
        configs.append(ModelConfig.from_folder(tmp_path))
    whole, cut = configs
    assert cut.num_hidden_layers == 6
    assert cut.hidden_size == whole.hidden_size
    assert cut.sliding_windows == whole.sliding_windows[:6]
    if whole.moe is not None:
        assert cut.moe.dense_layers == whole.moe.dense_layers & set(range(6))


def test_a_folder_may_have_fewer_layers(tmp_path):
    folder = make_model_folder("tiny", tmp_path, num_layers=1)
    assert ModelConfig.from_folder(folder).num_hidden_layers == 1


def test_more_layers_than_there_are_is_refused(tmp_path):
    with pytest.raises(ValueError, match="33 layers were asked for; the shape has 32"):
        make_model_folder("llama-3.1-8b", tmp_path, num_layers=33)


REDUCED = {
    "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 80,
    "moe_intermediate_size": 64, "vocab_size": 300,
    "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 16, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4, "index_head_dim": 16, "o_groups": 2, "o_lora_rank": 32,
    "max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rotary_dim": 8,
    "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_made_up_weights_of_a_narrow_shape_run(shape, tmp_path):
    config = with_depth(read_shape(shape), 6)
    for part in (config, config.get("text_config", {})):
        part |= {name: value for name, value in REDUCED.items() if name in part}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(
        tmp_path, device=torch.device("cpu"), dtype=torch.float32, load_format="dummy"
    )
    runner = PagedRunner(model)
    logits = runner.run(runner.add([5, 96, 0, 48, 49, 17]), chunk_size=4)
    assert logits.isfinite().all()
    assert logits.std() > 0.1
