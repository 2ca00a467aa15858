"""Sums over ranks get their fusions in every family, with and without weights of 8 bits."""

import pytest
import torch

from models.loading.loader import load_model
from models.parallel.collectives import without_other_ranks
from models.parallel.group import ParallelGroup
from tests.support.compiled_models import compile_at
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90]
OF_TWO = ParallelGroup(rank=0, size=2)
# Every layer has two sums over ranks; a norm after the sum itself or a scaled sum is not matched.
MATCHES = {
    "llama": 4,
    "internlm3": 4,
    "qwen2": 4,
    "qwen3": 4,
    "qwen3_moe": 4,
    "mixtral": 4,
    "gpt_oss": 6,
    "glm4_moe": 6,
    "deepseek_v2": 6,
    "deepseek_v3": 6,
    "phi3": 4,
    "gemma2": 0,
    "granite": 0,
    "olmo2": 0,
}


def half_of(folder, **options):
    """The first of two ranks' model."""
    cpu = torch.device("cpu")
    return load_model(folder, device=cpu, dtype=torch.float32, group=OF_TWO, **options)


@pytest.mark.parametrize("variant", MATCHES)
def test_sums_over_ranks_are_fused_in_every_family(variant, tmp_path):
    write_checkpoint(tmp_path, variant)
    model = half_of(tmp_path)
    with without_other_ranks():
        matches = compile_at(3)(model).pass_matches
    assert matches["all_reduce_norm"] == MATCHES[variant]
    assert model.expected_passes() <= {name for name, count in matches.items() if count}


@pytest.mark.parametrize("disabled", [(), ("norm_quant",), ("all_reduce_norm",)])
def test_norms_of_sums_over_ranks_take_part_in_products_of_8_bits(disabled, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    write_checkpoint(plain, "llama", **WIDE | {"intermediate_size": 512, "num_key_value_heads": 4})
    folder.mkdir()
    quantize_checkpoint(plain, folder, "deepseek")
    logits = []
    for level in (3, 0):
        model = half_of(folder, keep_quantized=True)
        with without_other_ranks():
            if level:
                matches = compile_at(level, disable_pass=[*disabled])(model).pass_matches
            runner = PagedRunner(model)
            logits.append(runner.run(runner.add(TOKENS), 5))
    # Two layers have four sums; the last norm comes before the head, which has no FP8 weight.
    assert matches.get("norm_quant", 0) == (0 if "norm_quant" in disabled else 3)
    assert matches.get("all_reduce_norm", 0) == (0 if "all_reduce_norm" in disabled else 4)
    assert (logits[0] - logits[1]).norm() <= 0.02 * logits[1].norm()
