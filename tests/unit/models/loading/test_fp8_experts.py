"""Experts that are stored as FP8 with scales by block: kept so, shared out, or dequantised."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.loader import load_model
from models.ops.experts.expert_formats import expert_values
from models.ops.products.fp8_linear import FP8
from models.parallel.group import ParallelGroup
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 256},
    # Half of the second block is missing.
    "glm4_moe": {"moe_intermediate_size": 192},
}


@pytest.fixture(params=FAMILIES)
def fp8_folder(request, tmp_path):
    (tmp_path / "fp8").mkdir()
    write_checkpoint(tmp_path / "plain", request.param, **WIDE | FAMILIES[request.param])
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "deepseek")
    return tmp_path / "fp8"


@pytest.fixture
def wide_folder(tmp_path):
    (tmp_path / "fp8").mkdir()
    write_checkpoint(tmp_path / "plain", "qwen3_moe", **WIDE | FAMILIES["qwen3_moe"])
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "deepseek")
    return tmp_path / "fp8"


def load(folder, **options):
    options = {"device": torch.device("cpu"), "dtype": torch.float32} | options
    return load_model(folder, **options)


def experts_of(model):
    return model.model.layers[1].mlp.experts


def values(experts, expert):
    """Returns one expert's two matrices, dequantised."""
    return [
        expert_values(weights[expert], scales[expert], torch.float32, num_parts=num_parts)
        for weights, scales, num_parts in (
            (experts.gate_up_proj, experts.gate_up_proj_scale, 2),
            (experts.down_proj, experts.down_proj_scale, 1),
        )
    ]


def test_kept_experts_represent_the_dequantised_values(fp8_folder):
    kept, plain = (experts_of(load(fp8_folder, keep_quantized=each)) for each in (True, False))
    assert kept.gate_up_proj.dtype == kept.down_proj.dtype == FP8
    for expert in range(len(kept.down_proj)):
        gate_up, down = values(kept, expert)
        assert torch.equal(gate_up, plain.gate_up_proj[expert])
        assert torch.equal(down, plain.down_proj[expert])


def test_ranks_together_hold_all_blocks(wide_folder):
    whole = experts_of(load(wide_folder, keep_quantized=True))
    shares = [
        experts_of(load(wide_folder, keep_quantized=True, group=ParallelGroup(rank=rank, size=2)))
        for rank in range(2)
    ]
    for name in ("down_proj", "down_proj_scale"):
        together = torch.cat([getattr(share, name).float() for share in shares], dim=-1)
        assert torch.equal(together, getattr(whole, name).float())
    for name in ("gate_up_proj", "gate_up_proj_scale"):
        parts = [getattr(share, name).float().chunk(2, dim=1) for share in shares]
        together = torch.cat([part[i] for i in range(2) for part in parts], dim=1)
        assert torch.equal(together, getattr(whole, name).float())


def test_shares_that_cut_a_block_are_dequantised(wide_folder):
    group = ParallelGroup(rank=1, size=4)
    experts = experts_of(load(wide_folder, keep_quantized=True, group=group))
    assert experts.down_proj.dtype == torch.float32
    assert experts.down_proj_scale is None


def test_one_expert_that_is_not_fp8_makes_all_of_a_layer_plain(wide_folder):
    file = wide_folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = tensors[name].float()
    save_file(tensors, file)
    model = load(wide_folder, keep_quantized=True)
    assert experts_of(model).gate_up_proj.dtype == torch.float32
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == FP8


@pytest.fixture(params=["compressed_channel", "compressed_tensor"])
def row_folder(request, tmp_path):
    (tmp_path / "fp8").mkdir()
    write_checkpoint(tmp_path / "plain", "qwen3_moe", **WIDE | FAMILIES["qwen3_moe"])
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", request.param)
    return tmp_path / "fp8"


def test_scales_by_row_or_tensor_are_kept_by_row(row_folder):
    kept, plain = (experts_of(load(row_folder, keep_quantized=each)) for each in (True, False))
    assert kept.down_proj.dtype == FP8
    assert kept.down_proj_scale.shape == (*kept.down_proj.shape[:2], 1)
    for expert in range(len(kept.down_proj)):
        gate_up, down = values(kept, expert)
        assert torch.equal(gate_up, plain.gate_up_proj[expert])
        assert torch.equal(down, plain.down_proj[expert])


def test_ranks_share_rows_and_have_all_scales_of_down(row_folder):
    whole = experts_of(load(row_folder, keep_quantized=True))
    shares = [
        experts_of(load(row_folder, keep_quantized=True, group=ParallelGroup(rank=rank, size=4)))
        for rank in range(4)
    ]
    for share in shares:
        assert torch.equal(share.down_proj_scale, whole.down_proj_scale)
    parts = [share.gate_up_proj_scale.chunk(2, dim=1) for share in shares]
    together = torch.cat([part[i] for i in range(2) for part in parts], dim=1)
    assert torch.equal(together, whole.gate_up_proj_scale)


def test_made_up_experts_are_sane_and_ignored_ones_plain(wide_folder):
    config = json.loads((wide_folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0"]
    (wide_folder / "config.json").write_text(json.dumps(config))
    model = load(wide_folder, keep_quantized=True, load_format="dummy")
    dtypes = [layer.mlp.experts.down_proj.dtype for layer in model.model.layers]
    assert dtypes == [torch.float32, FP8]
    runner = PagedRunner(model)
    logits = runner.run(runner.add([5, 96, 0, 48, 49, 17, 33]), chunk_size=4)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
