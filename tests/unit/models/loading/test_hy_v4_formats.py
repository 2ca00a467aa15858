"""Hy4 in the formats that quantisation tools write."""

import pytest
import torch

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
