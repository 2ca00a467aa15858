"""Models whose experts stay in 8 or 4 bits, on a GPU, against the same dequantised."""

import pytest
import torch

from models.layers.quantization import can_run_fp8
from models.loading.loader import load_model
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import FP8, WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.tolerances import FP8_EXPERTS_ERROR

pytestmark = pytest.mark.gpu

TOKEN_IDS = [5, 96, 0, 48, 49, 17, 33, 80, 2, 61]
LOGITS_ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest error, relative to the norm. Both sides' sums are rounded, in another order."""
DTYPES = pytest.mark.parametrize("dtype", LOGITS_ERROR, ids=str)


def logits(model):
    runner = PagedRunner(model, device="cuda", block_size=16)
    first, second = runner.add(TOKEN_IDS), runner.add(TOKEN_IDS[3:])
    return torch.cat([runner.run(first, chunk_size=4), runner.run(second, chunk_size=1)]).float()


def load(folder, dtype, **options):
    return load_model(folder, device=torch.device("cuda"), dtype=dtype, **options)


def assert_same_logits(kept, plain, dtype):
    actual, expected = logits(kept), logits(plain)
    assert ((actual - expected).norm() / expected.norm()) < LOGITS_ERROR[dtype]


@DTYPES
def test_mxfp4_experts_stay_packed(tmp_path, dtype):
    pack_experts(tmp_path, write_checkpoint(tmp_path, "gpt_oss", intermediate_size=96))
    kept = load(tmp_path, dtype)
    assert kept.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.uint8
    on_cpu = load_model(
        tmp_path, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=True
    )
    for name, param in on_cpu.named_parameters():
        if "experts." in name and param.dtype == torch.uint8:
            assert torch.equal(kept.get_parameter(name).cpu(), param)
    assert_same_logits(kept, load(tmp_path, dtype, keep_quantized=False), dtype)


def test_a_half_has_not_the_range_of_mxfp4_and_is_dequantised(tmp_path):
    pack_experts(tmp_path, write_checkpoint(tmp_path, "gpt_oss", intermediate_size=96))
    model = load(tmp_path, torch.float16)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float16


@DTYPES
def test_fp8_experts_stay_so(tmp_path, dtype):
    if not can_run_fp8(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 products")
    (tmp_path / "fp8").mkdir()
    write_checkpoint(tmp_path / "plain", "qwen3_moe", **WIDE, moe_intermediate_size=192)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "deepseek")
    kept, plain = (load(tmp_path / "fp8", dtype, keep_quantized=each) for each in (None, False))
    experts = kept.model.layers[1].mlp.experts
    assert experts.down_proj.dtype == FP8
    # Only experts are compared, which round their activations.
    hidden = torch.randn(9, WIDE["hidden_size"], device="cuda").to(dtype)
    for num_tokens in (1, 9):
        actual, expected = (
            model.model.layers[1].mlp(hidden[:num_tokens]).float() for model in (kept, plain)
        )
        assert ((actual - expected).norm() / expected.norm()) < FP8_EXPERTS_ERROR
