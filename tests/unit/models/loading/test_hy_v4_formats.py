"""Hy4 in the formats that quantisation tools write, and with fields left out."""

import json

import pytest
import torch

from models.config import ModelConfig
from models.loading.loader import load_model
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

TOKENS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61, 7, 7, 20]
# All tokens and experts are chosen: rounding may change a choice.
SIZES = {name: size for name, size in WIDE.items() if name != "head_dim"} | {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 128,
    "index_head_dim": 128, "index_n_heads": 8, "index_topk": 64, "num_experts_per_tok": 8,
    "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
ERRORS = {"fp8": 0.25, "awq": 0.03, "compressed-nvfp4": 0.02, "compressed-mxfp4": 0.02}
"""Format -> the error of products of kept weights; those of FP8 round activations, too."""


@pytest.mark.parametrize("form", ERRORS)
def test_kept_weights_compute_what_dequantised_ones_do(form, tmp_path):
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    write_checkpoint(plain, "hy_v4", **SIZES)
    if form == "fp8":
        stored.mkdir()
        quantize_checkpoint(plain, stored, "deepseek")
    else:
        write_quantized(plain, stored, FORMATS[form])

    def logits(*, keep_quantized):
        model = load_model(
            stored, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=keep_quantized
        )
        kinds = {weights.kept for weights in model.weight_formats}
        assert (kinds != {"float32"}) == keep_quantized
        runner = PagedRunner(model)
        return runner.run(runner.add(TOKENS), 5)

    kept, expected = logits(keep_quantized=True), logits(keep_quantized=False)
    assert (kept - expected).norm() <= ERRORS[form] * expected.norm()


ABSENT = (
    *("indexer_types", "mlp_layer_types", "layer_types", "n_shared_experts", "norm_topk_prob"),
    *("hc_eps", "hc_magnitude", "hc_mult", "index_topk", "swiglu_limit", "routed_scaling_factor"),
)


def test_a_file_may_leave_out_the_defaults_of_transformers(tmp_path):
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    transformers.HYV4Config(
        num_hidden_layers=7, architectures=["HYV4ForCausalLM"], rope_parameters=rope
    ).save_pretrained(tmp_path)
    expected = ModelConfig.from_folder(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values = {name: value for name, value in values.items() if name not in ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig.from_folder(tmp_path) == expected
    assert expected.mla.index.sharing_layers == {2, 3, 4, 6}
    assert expected.moe.dense_layers == {0}
