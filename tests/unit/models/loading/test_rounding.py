"""Plain weights that become FP8 while they load."""

import json

import pytest
import torch
from safetensors.torch import load_file

from models.config import ConfigError
from models.layers.quantization import FP8_ROWS, UNQUANTIZED
from models.loading.loader import load_model
from models.number_formats import FP8
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

MOE = WIDE | {"moe_intermediate_size": 128}
CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns the folders of random checkpoints by family."""
    folders = {}
    for variant, shape in (("llama", WIDE), ("qwen3_moe", MOE)):
        folders[variant] = tmp_path_factory.mktemp(variant)
        write_checkpoint(folders[variant], variant, **shape)
    return folders


def load(folder, **options):
    options = {"rounds_to_fp8": True} | options
    return load_model(folder, device=CPU, dtype=torch.float32, **options)


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_values_are_those_of_a_checkpoint_with_scales_by_row(source, variant, tmp_path):
    write_quantized(source[variant], tmp_path, FORMATS["compressed-fp8-channel"])
    rounded, stored = load(source[variant]), load(tmp_path, rounds_to_fp8=False)
    for (name, param), other in zip(
        rounded.named_parameters(), stored.named_parameters(), strict=True
    ):
        assert torch.equal(param, other[1]), name


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_kept_weights_are_fp8_and_others_stay(source, variant):
    kept, rounded = (load(source[variant], keep_quantized=each) for each in (True, False))
    layer = kept.model.layers[0]
    qkv = layer.self_attn.qkv_proj
    assert (qkv.method, qkv.weight.dtype) == (FP8_ROWS, FP8)
    values = qkv.weight.float() * qkv.weight_scale
    assert torch.equal(values, rounded.model.layers[0].self_attn.qkv_proj.weight)
    if variant == "qwen3_moe":
        experts = layer.mlp.experts
        values = experts.gate_up_proj.float() * experts.gate_up_proj_scale
        assert torch.equal(values, rounded.model.layers[0].mlp.experts.gate_up_proj)
        assert layer.mlp.gate.weight.dtype == torch.float32
    assert kept.lm_head.weight.dtype == kept.model.embed_tokens.weight.dtype == torch.float32
    formats = {(each.stored, each.kept): each for each in kept.weight_formats}
    assert formats["float32", "fp8 rows"].rounds_activations
    assert not formats["float32", "float32"].rounds_activations
    total = sum(param.nbytes for param in kept.parameters())
    assert sum(each.bytes for each in kept.weight_formats) == total


def test_ranks_share_the_scales_of_whole_rows(source):
    whole = load(source["llama"], keep_quantized=True).model.layers[1].mlp.down_proj
    parts = [
        load(source["llama"], keep_quantized=True, group=ParallelGroup(rank=rank, size=2))
        .model.layers[1]
        .mlp.down_proj
        for rank in range(2)
    ]
    assert all(torch.equal(part.weight_scale, whole.weight_scale) for part in parts)
    together = torch.cat([part.weight.float() for part in parts], dim=1)
    assert torch.equal(together, whole.weight.float())


def test_dummy_weights_have_the_same_form(source):
    model = load(source["llama"], load_format="dummy", keep_quantized=True)
    assert model.model.layers[0].mlp.gate_up_proj.method is FP8_ROWS
    runner = PagedRunner(model)
    assert runner.run(runner.add([5, 96, 0, 48]), chunk_size=4).isfinite().all()
    assert load(source["llama"], load_format="dummy").model.layers[0].mlp.down_proj.method is (
        UNQUANTIZED
    )


def test_quantised_checkpoints_are_refused(source, tmp_path):
    write_quantized(source["llama"], tmp_path, FORMATS["awq"])
    with pytest.raises(ConfigError, match="this one is quantised by awq"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "awq"
    assert UP not in load_file(tmp_path / "model.safetensors")
