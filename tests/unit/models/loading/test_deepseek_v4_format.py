"""DeepSeek V4 as released: FP8 in blocks, MXFP4 experts, other names, draft layers passed over."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.loading.checkpoint import SINGLE_FILE
from models.loading.loader import load_model
from models.number_formats import E2M1_VALUES, E8M0, FP8
from models.parallel.group import ParallelGroup, PipelineStage
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90, 4, 4, 61, 18, 20, 33, 2, 71]
SIZES = {
    "hidden_size": 64, "intermediate_size": 32, "head_dim": 48, "partial_rotary_factor": 0.125,
    "q_lora_rank": 136,
}  # fmt: skip
ROUNDED = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight$")
LEGACY = {
    "compress_rate_csa": 4, "compress_rate_hca": 10, "num_hash_layers": 1,
    "qk_rope_head_dim": 6, "rope_scaling": None, "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip
ABSENT = ("compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")


def rounded_to_fp8(weight):
    """Returns FP8 values, exponents of their blocks, and the values multiplied out."""
    rows, columns = weight.shape
    scale = torch.full((-(-rows // 128), -(-columns // 128)), 2.0**-6)
    factor = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    values = (weight / factor).to(FP8)
    return values, scale.to(E8M0), values.float() * factor


def drawn_fp4(shape):
    """Returns packed values as int8, exponents of runs of 32, and the values multiplied out."""
    packed = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    scale = torch.randint(122, 125, (shape[0], shape[1] // 32), dtype=torch.uint8).view(E8M0)
    halves = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()
    values = torch.tensor(E2M1_VALUES)[halves]
    return packed.view(torch.int8), scale, values * scale.float().repeat_interleave(32, 1)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Returns the folder, and transformers' model of the dequantised weights."""
    folder = tmp_path_factory.mktemp("released")
    write_checkpoint(folder, "deepseek_v4", **SIZES)
    stored, plain = {}, {}
    torch.manual_seed(5)
    for name, x in load_file(folder / SINGLE_FILE).items():
        own_name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        own_name = own_name.replace("hc_head.hc_", "hc_head_")
        if not ROUNDED.search(name) or ("compressor" in name and "wq_b" not in name):
            stored[own_name] = x.int() if name.endswith("tid2eid") else x
            plain[name] = x
            continue
        is_expert = ".experts." in name
        values, scale, plain[name] = drawn_fp4(x.shape) if is_expert else rounded_to_fp8(x)
        stored[own_name] = values
        stored[own_name.removesuffix("weight") + "scale"] = scale
    save_file(plain, folder / SINGLE_FILE, metadata={"format": "pt"})
    reference = _reference(folder)
    stored["mtp.0.attn.wq_a.weight"] = torch.randn(4, 8)
    save_file(stored, folder / SINGLE_FILE)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ABSENT} | LEGACY
    (folder / "config.json").write_text(json.dumps(config))
    return folder, reference


def _reference(folder):
    import transformers

    return transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def test_logits_are_those_of_dequantised_weights(released):
    folder, reference = released
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model)
    logits = runner.run(runner.add(TOKENS), chunk_size=5)
    expected = transformers_logits(reference, TOKENS)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    kept = {weights.stored for weights in model.weight_formats}
    assert {"fp8 blocks of 128 x 128", "mxfp4"} <= kept


def test_the_format_of_experts_may_be_in_quantization_config(released, tmp_path):
    folder, _ = released
    values = json.loads((folder / "config.json").read_text())
    expected = ModelConfig.from_folder(folder)
    values["quantization_config"]["expert_dtype"] = values.pop("expert_dtype")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path) == expected


def test_ratios_of_released_files_name_the_layers(released, tmp_path):
    folder, _ = released
    values = json.loads((folder / "config.json").read_text())
    expected = ModelConfig.from_folder(folder)
    del values["layer_types"]
    values["compress_ratios"] = [0, 4, 128, 4, 0]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path) == expected
    values["compress_ratios"] = [0, 4, 16, 4]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"compress_ratios is .*must be 0, 4 or 128"):
        ModelConfig.from_folder(tmp_path)


def test_later_stages_have_no_layers_of_a_table(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v4", mlp_layer_types=["hash_moe"] * 4)
    stage = ParallelGroup(stage=PipelineStage(rank=1, size=2))
    with pytest.raises(ValueError, match="layer 2 chooses experts by token ids"):
        load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, group=stage)
