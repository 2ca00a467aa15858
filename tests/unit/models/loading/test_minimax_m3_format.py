"""MiniMax M3 as released: a wrapper with names and fields of its own, and FP8 weights."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.config import ConfigError, ModelConfig
from models.loading.checkpoint import SINGLE_FILE
from models.loading.loader import load_model
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import FP8, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import transformers_logits, write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90, 4, 4, 61, 18, 20, 33, 2, 71]
SIZES = WIDE | {
    "intermediate_size": 256, "dense_intermediate_size": 384, "shared_intermediate_size": 256,
    "num_local_experts": 4, "num_experts_per_tok": 2, "index_head_dim": 64, "rotary_dim": 32,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "patch_size": 4,
}  # fmt: skip
HUB = {
    "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1], "use_gemma_norm": True,
    "qk_norm_type": "per_head", "n_shared_experts": 1, "num_mtp_modules": 1,
    "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_index_dim": 64, "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 3, "sparse_block_size": 4, "sparse_score_type": "max",
        "sparse_init_block": 0, "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 1, 1],
    },
}  # fmt: skip
ABSENT = (
    "layer_types", "mlp_layer_types", "rope_parameters", "index_n_heads", "index_head_dim",
    "index_block_size", "index_topk_blocks", "index_local_blocks",
)  # fmt: skip


def write_wrapper(folder, text):
    """Writes the whole model around a text model, as transformers does under released names."""
    config = transformers.MiniMaxM3VLConfig(
        text_config=text.config.to_dict(), vision_config=VISION, projector_hidden_size=24
    )
    whole = transformers.MiniMaxM3SparseForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    return whole.eval()


def as_released(folder):
    """Gives a checkpoint the fields of a released one, and a tensor of a draft layer."""
    config = json.loads((folder / "config.json").read_text())
    text = {name: each for name, each in config["text_config"].items() if name not in ABSENT}
    config["text_config"] = text | HUB
    (folder / "config.json").write_text(json.dumps(config))
    named = load_file(folder / SINGLE_FILE)
    named["language_model.model.mtp.layers.0.eh_proj.weight"] = torch.randn(4, 8)
    save_file(named, folder / SINGLE_FILE)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Returns the folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("released")
    text = write_checkpoint(folder / "text", "minimax_m3", **SIZES)
    whole = write_wrapper(folder / "whole", text)
    as_released(folder / "whole")
    return folder / "whole", whole


def load(folder, **options):
    options = {"device": torch.device("cpu"), "dtype": torch.float32} | options
    return load_model(folder, **options)


def logits_of(model):
    runner = PagedRunner(model)
    return runner.run(runner.add(TOKENS), 5)


def test_the_released_wrapper_has_the_logits_of_transformers(released):
    folder, reference = released
    expected = transformers_logits(reference, TOKENS)
    assert (logits_of(load(folder)) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_blocks_that_are_not_chosen_are_not_attended(released, tmp_path):
    """Shows that the other tests' prompts are long enough for a choice."""
    folder, _ = released
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["sparse_attention_config"]["sparse_topk_blocks"] = 9
    (tmp_path / SINGLE_FILE).symlink_to(folder / SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    some, whole = logits_of(load(folder)), logits_of(load(tmp_path))
    torch.testing.assert_close(some[:12], whole[:12])
    assert (some[12:] - whole[12:]).abs().max() > 0.1


def test_weights_of_8_bits_stay_and_have_their_values(released, tmp_path):
    folder, _ = released
    (tmp_path / "stored").mkdir()
    plain = quantize_checkpoint(folder, tmp_path / "stored", "deepseek")
    save_file(plain, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    kept, expected = load(tmp_path / "stored", keep_quantized=True), logits_of(load(tmp_path))
    assert kept.model.layers[0].mlp.gate_up_proj.weight.dtype == FP8
    assert kept.model.layers[1].self_attn.qkv_proj.weight.dtype == FP8
    actual = logits_of(load(tmp_path / "stored", keep_quantized=False))
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def changed(section, **fields):
    return {"sparse_attention_config": HUB["sparse_attention_config"] | fields} | section


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed({}, sparse_num_index_heads=4), "sparse_num_index_heads is 4; it must be 2, as"),
        (changed({}, sparse_index_dim=32), "sparse_index_dim is 32; it must be 64, as head_dim"),
        (changed({}, sparse_local_block=4), "sparse_local_block is 4; it must be at most the 3"),
        (changed({}, sparse_block_size=0), "sparse_block_size is 0; it must be a positive integer"),
        (changed({}, sparse_topk_blocks=2**40), "sparse_topk_blocks is .*; it must be at most"),
        (changed({}, sparse_init_block=1), "sparse_init_block is 1; it must be 0"),
        (changed({}, sparse_score_type="mean"), "sparse_score_type is 'mean'; it must be one of"),
        (changed({}, use_sparse_attention=False), "use_sparse_attention is False; it must be true"),
        (changed({}, sparse_attention_freq=[1]), "sparse_attention_freq is .* for every layer"),
        (changed({}, sparse_disable_index_value=[1, 1, 0]), "sparse_disable_index_value is .*true"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is .*full_attention, minimax_m3"),
        ({"use_gemma_norm": False}, "use_gemma_norm is False; it must be true"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type is 'per_layer'; it must be one of per_head"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; it must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be one of swigluoai, silu"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be one of sigmoid"),
        ({"moe_layer_freq": [0, 1]}, "moe_layer_freq is .* must be 0 or 1 for every layer"),
    ],
)
def test_what_is_not_served_is_refused(released, tmp_path, changes, message):
    folder, _ = released
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(tmp_path)
