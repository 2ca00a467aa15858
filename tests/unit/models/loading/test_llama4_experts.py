"""Experts of Llama 4: stacked with rows and columns exchanged, in FP8 or not, or one by one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.loading.checkpoint import SINGLE_FILE
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from tests.support.quantized_checkpoints import FP8, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

RANKS = [ParallelGroup(), ParallelGroup(rank=1, size=2)]


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    sizes = {"intermediate_size": 256, "intermediate_size_mlp": 256, "num_local_experts": 3}
    write_checkpoint(folder, "llama4_odd", **WIDE | {"hidden_size": 384} | sizes)
    return folder


def load(folder, **options):
    options = {"device": torch.device("cpu"), "dtype": torch.float32} | options
    return load_model(folder, **options)


def weights_of(model):
    """Returns all weights, multiplied out."""
    state = dict(model.state_dict())
    weights = {}
    for name, value in state.items():
        if not name.endswith("_scale"):
            weights[name] = value.float()
            if (scale := state.get(f"{name}_scale")) is not None:
                rows, columns = value.shape[-2:]
                for dim, size in ((-1, columns), (-2, rows)):
                    count = scale.shape[dim]
                    repeats = size if count == 1 else 128 if count < size else 1
                    scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, size)
                weights[name] *= scale
    return weights


def check(stored, expected):
    for group in RANKS:
        wanted = weights_of(load(expected, group=group))
        for keeps in (False, True):
            model = load(stored, group=group, keep_quantized=keeps)
            layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
            assert all((mlp.experts.down_proj.dtype == FP8) == keeps for mlp in layers)
            found = weights_of(model)
            assert found.keys() == wanted.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


def rounded(rows):
    """Returns matrices in FP8 with a scale for each row, and their product."""
    scale = rows.abs().amax(-1, keepdim=True) / 448
    values = (rows / scale).to(FP8)
    return values, scale, values.float() * scale


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(config))


def test_fp8_as_released_has_its_values(plain, tmp_path):
    """The form of FbgemmFp8HfQuantizer, for Maverick; attention is left as it is."""
    stored, dequantised = {}, {}
    for name, x in load_file(plain / SINGLE_FILE).items():
        stored[name] = dequantised[name] = x
        if ".experts." in name:
            values, scale, product = rounded(x.transpose(1, 2))
            stored[name], dequantised[name] = values.transpose(1, 2), product.transpose(1, 2)
            is_down = name.endswith("down_proj")
            stored[f"{name}_scale"] = scale if is_down else scale.transpose(1, 2)
        elif ".feed_forward." in name and name.endswith("_proj.weight"):
            stored[name], scale, dequantised[name] = rounded(x)
            stored[f"{name}_scale"] = scale
    config = json.loads((plain / "config.json").read_text())
    write(tmp_path / "dequantised", dequantised, config)
    unquantised = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(5) for part in "qkvo"]
    config["quantization_config"] = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": [*unquantised, "lm_head", "model.layers.1.feed_forward.router"],
    }
    write(tmp_path / "stored", stored, config)
    check(tmp_path / "stored", tmp_path / "dequantised")


@pytest.mark.parametrize("kind", ["deepseek", "compressed_channel"])
def test_experts_that_come_one_by_one_have_their_values(plain, tmp_path, kind):
    """The form of llm-compressor."""
    single = {}
    for name, x in load_file(plain / SINGLE_FILE).items():
        if ".experts." not in name:
            single[name] = x
            continue
        path, _, part = name.rpartition(".")
        for expert, matrix in enumerate(x.transpose(1, 2)):
            names = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
            for own, rows in zip(names, matrix.chunk(len(names)), strict=True):
                single[f"{path}.{expert}.{own}.weight"] = rows
    config = json.loads((plain / "config.json").read_text())
    write(tmp_path / "single", single, config)
    (tmp_path / "stored").mkdir()
    dequantised = quantize_checkpoint(tmp_path / "single", tmp_path / "stored", kind)
    write(tmp_path / "dequantised", dequantised, config)
    check(tmp_path / "stored", tmp_path / "dequantised")
