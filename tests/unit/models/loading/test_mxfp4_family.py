"""gpt-oss from MXFP4 blocks, as it is published, against transformers with the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import CheckpointError
from models.loading.loader import load_model
from models.operands.run_scales import by_row
from models.parallel.group import SINGLE, ParallelGroup
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]


@pytest.fixture
def packed(tmp_path):
    """Returns a folder with a packed checkpoint, and transformers' model of it."""
    reference = write_checkpoint(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96)
    pack_experts(tmp_path, reference)
    return tmp_path, reference


def load(folder, **options):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32, **options)


@pytest.mark.parametrize("is_kept", [False, True])
def test_mxfp4_experts_give_the_logits_of_transformers(packed, is_kept):
    folder, reference = packed
    model = load(folder, keep_quantized=is_kept)
    down = model.model.layers[0].mlp.experts.down_proj
    assert down.dtype == (torch.uint8 if is_kept else torch.float32)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    expected = transformers_logits(reference, TOKEN_IDS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_they_are_dequantised_on_a_cpu_by_default(packed):
    experts = load(packed[0]).model.layers[0].mlp.experts
    assert experts.down_proj.dtype == torch.float32
    assert experts.down_proj_scale is None


def test_rows_that_end_within_a_run_are_dequantised(tmp_path):
    # No such blocks can be stored; made-up weights take any size.
    write_checkpoint(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=80)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    experts = load(tmp_path, keep_quantized=True, load_format="dummy").model.layers[0].mlp.experts
    assert experts.down_proj.dtype == torch.float32


def test_made_up_mxfp4_experts_are_sane(packed):
    model = load(packed[0], keep_quantized=True, load_format="dummy")
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.uint8
    runner = PagedRunner(model)
    logits = runner.run(runner.add(TOKEN_IDS), chunk_size=4)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


@pytest.mark.parametrize("exponent", [255, 191])
def test_a_kept_scale_that_products_cannot_take_is_refused(packed, exponent):
    file = packed[0] / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][1, 2, 0] = exponent
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{name} .* a scale of 2\^64 or more"):
        load(packed[0], keep_quantized=True)
    tensors[name][1, 2, 0] = 190
    save_file(tensors, file)
    load(packed[0], keep_quantized=True)


def test_kept_blocks_need_their_scales(packed):
    file = packed[0] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"down_proj_scales are missing"):
        load(packed[0], keep_quantized=True)


GROUPS = [ParallelGroup(rank=rank, size=2) for rank in range(2)]


def test_shares_that_cut_a_run_are_dequantised(packed):
    # 48 features are one run and a half.
    share = load(packed[0], keep_quantized=True, group=GROUPS[1])
    assert share.model.layers[1].mlp.experts.down_proj.dtype == torch.float32


def test_ranks_together_hold_all_numbers(tmp_path):
    pack_experts(tmp_path, write_checkpoint(tmp_path, "gpt_oss", intermediate_size=128))
    whole, *shares = (
        load(tmp_path, keep_quantized=True, group=group).model.layers[1].mlp.experts
        for group in (SINGLE, *GROUPS)
    )
    for both in zip(*map(down_of, shares), down_of(whole), strict=True):
        assert torch.equal(torch.cat(both[:-1], dim=-1), both[-1])
    for *own, all_rows in zip(*map(gate_up_of, shares), gate_up_of(whole), strict=True):
        parts = [each.chunk(2, dim=1) for each in own]
        together = torch.cat([part[i] for i in range(2) for part in parts], dim=1)
        assert torch.equal(together, all_rows)


def down_of(experts):
    num_inputs = 2 * experts.down_proj.shape[-1]
    return experts.down_proj, by_row(experts.down_proj_scale, num_inputs, 1)


def gate_up_of(experts):
    num_inputs = 2 * experts.gate_up_proj.shape[-1]
    return experts.gate_up_proj, by_row(experts.gate_up_proj_scale, num_inputs, 2)
