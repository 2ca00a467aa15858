"""A rank of an expert parallel group reads its own experts, and nothing of the others."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.loader import load_model
from models.loading.plan import Load
from models.parallel.group import ParallelGroup
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

SIZE = 2


def load(folder, rank=None, **options):
    group = ParallelGroup()
    if rank is not None:
        group = ParallelGroup(rank=rank, size=SIZE, enable_expert_parallel=True)
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "group": group} | options
    return load_model(folder, **options)


def checkpoint(folder, kind):
    """Writes a checkpoint of a kind, and returns its folder."""
    plain = folder / "plain"
    if kind == "awq":
        write_checkpoint(plain, "qwen3_moe", **WIDE | {"moe_intermediate_size": 192})
        write_quantized(plain, folder / "awq", FORMATS["awq"])
        return folder / "awq"
    if kind == "fp8":
        (folder / "fp8").mkdir()
        write_checkpoint(plain, "qwen3_moe", **WIDE | {"moe_intermediate_size": 192})
        quantize_checkpoint(plain, folder / "fp8", "deepseek")
        return folder / "fp8"
    wide = {"hidden_size": 64, "intermediate_size": 64} if kind == "mxfp4" else {}
    model = write_checkpoint(plain, "gpt_oss" if kind != "plain" else "qwen3_moe", **wide)
    if kind == "mxfp4":
        pack_experts(plain, model)
    return plain


@pytest.mark.parametrize("keep_quantized", [False, True], ids=["converted", "kept"])
@pytest.mark.parametrize("kind", ["plain", "stacked", "mxfp4", "fp8", "awq"])
def test_ranks_hold_the_experts_of_a_single_one(tmp_path, kind, keep_quantized):
    folder = checkpoint(tmp_path, kind)
    whole = load(folder, keep_quantized=keep_quantized)
    for rank in range(SIZE):
        part = load(folder, rank, keep_quantized=keep_quantized)
        for layer, full in zip(part.model.layers, whole.model.layers, strict=True):
            own = layer.mlp.experts
            experts = list(own.placement.experts_of(rank))
            for name, param in own.named_parameters():
                expected = getattr(full.mlp.experts, name)[experts]
                assert param.dtype == expected.dtype
                assert torch.equal(param.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ["plain", "stacked", "mxfp4", "fp8", "awq"])
def test_experts_move_with_their_scales(tmp_path, kind):
    model = load(checkpoint(tmp_path, kind), 0, keep_quantized=True)
    experts = model.model.layers[1].mlp.experts
    before = {name: param.clone() for name, param in experts.named_parameters()}
    first, second, *others = experts.placement.physical_to_logical
    swapped = replace(experts.placement, physical_to_logical=(second, first, *others))
    experts.place(swapped)
    order = [1, 0, *range(2, swapped.num_local)]
    for name, param in experts.named_parameters():
        assert torch.equal(param.view(torch.uint8), before[name][order].view(torch.uint8))
    assert experts.expert_map.tolist() == swapped.expert_map(0)


@pytest.mark.parametrize("kind", ["plain", "stacked", "mxfp4", "fp8", "awq"])
def test_experts_of_other_ranks_are_not_read(tmp_path, kind, monkeypatch):
    folder = checkpoint(tmp_path, kind)
    read = {}
    of_this_rank = Load.of_this_rank

    def watched(self):
        for each in of_this_rank(self):
            if ".experts." in each.tensor.name:
                read[each.tensor.name] = read.get(each.tensor.name, 0) + each.parts[0].nbytes
            yield each

    monkeypatch.setattr(Load, "of_this_rank", watched)
    totals = []
    for rank in range(SIZE):
        read.clear()
        load(folder, rank)
        totals.append(sum(read.values()))
    stored = load_file(folder / "model.safetensors")
    all_experts = sum(
        values.nbytes
        for name, values in stored.items()
        if ".experts." in name and not name.endswith(("scales", "_scale_inv", "qzeros"))
    )
    assert totals[0] == totals[1]
    assert sum(totals) == all_experts


@pytest.mark.parametrize("kind", ["plain", "stacked"])
def test_a_fault_in_another_ranks_expert_is_not_seen(tmp_path, kind):
    folder = checkpoint(tmp_path, kind)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = max(name for name in tensors if ".experts." in name and "down_proj" in name)
    tensors[name].flatten()[-1] = torch.nan
    save_file(tensors, file)
    load(folder, 0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        load(folder, 1)
