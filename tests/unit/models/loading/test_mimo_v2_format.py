"""MiMo-V2 as released: FP8 in blocks, other names, and draft layers that are passed over."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.loading.checkpoint import SINGLE_FILE
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import FP8, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90]
SIZES = WIDE | {
    "head_dim": 192, "v_head_dim": 128, "moe_intermediate_size": 256, "n_routed_experts": 4,
    "intermediate_size": 512,
}  # fmt: skip
HUB = {
    "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": 1e-5,
    "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334,
    "sliding_window": 6, "sliding_window_size": 6, "swa_num_key_value_heads": 4,
    "swa_num_attention_heads": 4, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "routed_scaling_factor": None, "n_shared_experts": None, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "add_swa_attention_sink_bias": True,
}  # fmt: skip
ABSENT = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")


def as_released(folder, plain):
    """Gives a checkpoint of FP8 blocks the names and fields of a released one."""
    named = {}
    for name, x in load_file(folder / SINGLE_FILE).items():
        if "o_proj" not in name:
            named[name.replace(".sinks", ".attention_sink_bias")] = x
    for name, x in plain.items():
        if "o_proj.weight" in name:
            named[name] = x
    named["model.mtp.layers.0.eh_proj.weight"] = torch.randn(4, 8)
    save_file({name: x.contiguous() for name, x in named.items()}, folder / SINGLE_FILE)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ABSENT} | HUB
    kept = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)]
    config["quantization_config"]["ignored_layers"] = kept
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Returns the folder, and transformers' model of the dequantised weights."""
    tmp_path = tmp_path_factory.mktemp("released")
    reference = write_checkpoint(tmp_path / "plain", "mimo_v2", **SIZES)
    (tmp_path / "stored").mkdir()
    plain = quantize_checkpoint(tmp_path / "plain", tmp_path / "stored", "deepseek")
    as_released(tmp_path / "stored", load_file(tmp_path / "plain" / SINGLE_FILE))
    own = load_file(tmp_path / "plain" / SINGLE_FILE)
    for name in plain:
        if "o_proj" in name:
            plain[name] = own[name]
    (tmp_path / "values").mkdir()
    save_file(plain, tmp_path / "values" / SINGLE_FILE, metadata={"format": "pt"})
    config = (tmp_path / "plain" / "config.json").read_text()
    (tmp_path / "values" / "config.json").write_text(config)
    model = type(reference).from_pretrained(tmp_path / "values", attn_implementation="eager")
    return tmp_path / "stored", model.eval()


def load(folder, **options):
    options = {"device": torch.device("cpu"), "dtype": torch.float32} | options
    return load_model(folder, **options)


def test_logits_are_those_of_the_dequantised_weights(released):
    folder, reference = released
    runner = PagedRunner(load(folder))
    logits = runner.run(runner.add(TOKENS), 5)
    expected = transformers_logits(reference, TOKENS)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("size", [1, 2])
def test_all_but_queries_keys_and_outputs_stays_fp8(released, size):
    folder, _ = released
    for rank in range(size):
        group = ParallelGroup(rank=rank, size=size)
        model = load(folder, keep_quantized=True, group=group)
        first, *sparse = model.model.layers
        assert first.mlp.gate_up_proj.weight.dtype == FP8
        for layer in sparse:
            assert layer.mlp.experts.gate_up_proj.dtype == FP8
            assert layer.self_attn.v_proj.weight.dtype == FP8
            assert layer.self_attn.qk_proj.weight.dtype == torch.float32
            assert layer.self_attn.o_proj.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim is 128; it must be 192, as in other layers"),
        ({"swa_v_head_dim": 64}, "v_head_dim is 128; it must be at most 192, and equal in all"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True; it must"),
        ({"hybrid_layer_pattern": [0, 2, 1]}, "hybrid_layer_pattern is .* 0 or 1 for every layer"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is .* must be 0 or 1 for every layer"),
        ({"swa_num_key_value_heads": 3}, "num_key_value_heads is 2; it must be a divisor of 4"),
    ],
)
def test_what_is_not_served_is_refused(released, tmp_path, changes, message):
    folder, _ = released
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(tmp_path)
