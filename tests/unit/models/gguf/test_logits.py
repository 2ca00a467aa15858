"""A GGUF file of a checkpoint gives the logits of transformers on the same weights."""

import random

import pytest
import torch

from models.loading.loader import load_model
from services.engine.checkpoint.gguf_model import gguf_files, made_folder
from services.engine.checkpoint.model_files import ModelFolderError
from tests.support.expert_variants import DEEPSEEK_ROPE
from tests.support.gguf_files import write_gguf
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

CPU = torch.device("cpu")
VARIANTS = {
    "llama": {},
    "llama_bias": {},
    "llama_tied": {},
    "llama_llama3_rope": {},
    "llama_linear_rope": {},
    "llama_yarn_rope": {},
    "mistral_explicit_head": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma2": {"query_pre_attn_scalar": 10},
    "gemma3": {"query_pre_attn_scalar": 10, "num_hidden_layers": 7},
    "phi3": {},
    "phi3_long": {},
    "phi3_partial_rotary": {},
    "granite": {},
    "olmo2": {},
    "glm4_moe": {},
    "deepseek_v2": {"rope_parameters": {**DEEPSEEK_ROPE, "mscale": 0.7}},
    "deepseek_v2_groups": {},
    "deepseek_v3": {},
    "deepseek_v3_yarn_bias": {
        "rope_parameters": {**DEEPSEEK_ROPE, "mscale": 0.7},
        "attention_bias": False,
    },
    "gpt_oss": {"swiglu_limit": 7.0},
}
"""Variant -> what of it GGUF cannot say, and has a fixed value there."""


def opened_files(file, folder):
    return made_folder(gguf_files(file, ""), folder / "made")


def opened(folder, file, **options):
    return load_model(made_folder((file,), folder / "made"), device=CPU, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant, tmp_path):
    reference = write_checkpoint(tmp_path / "source", variant, **VARIANTS[variant])
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path / "source", file)
    model = opened(tmp_path, file, dtype=torch.float32)
    tokens = random.Random(0).choices(range(97), k=29)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(tokens), chunk_size=11)
    expected = transformers_logits(reference, tokens)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_shards_are_one_model(tmp_path):
    write_checkpoint(tmp_path / "source", "qwen3")
    write_gguf(tmp_path / "source", tmp_path / "whole.gguf")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf", num_shards=3)
    files = gguf_files(tmp_path / "model-00002-of-00003.gguf", "")
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = opened(tmp_path, tmp_path / "whole.gguf", dtype=torch.float32)
    parts = load_model(made_folder(files, tmp_path / "made"), device=CPU, dtype=torch.float32)
    for name, values in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], values)


def test_a_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path / "source", "qwen3")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf", num_shards=2)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelFolderError, match=r"model-00002-of-00002\.gguf"):
        opened_files(tmp_path / "model-00001-of-00002.gguf", tmp_path)
