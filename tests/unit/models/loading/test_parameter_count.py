"""The number of parameters is the checkpoint's, however the weights are kept."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from models.loading.loader import load_model
from models.loading.parameter_count import count_parameters, count_whole
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint


def count(folder, *, is_kept):
    model = load_model(
        folder, device=torch.device("cpu"), dtype=torch.float32, keep_quantized=is_kept
    )
    return count_parameters(model)


def test_packed_numbers_count_and_their_scales_do_not(tmp_path):
    reference = write_checkpoint(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96)
    pack_experts(tmp_path, reference)
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert count(tmp_path, is_kept=True) == count(tmp_path, is_kept=False) == expected


def test_fp8_counts_as_it_would_dequantised(tmp_path):
    (tmp_path / "fp8").mkdir()
    reference = write_checkpoint(tmp_path / "plain", "qwen3_moe", **WIDE, moe_intermediate_size=192)
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", "deepseek")
    expected = sum(parameter.numel() for parameter in reference.parameters())
    assert count(tmp_path / "fp8", is_kept=True) == expected
    assert count(tmp_path / "fp8", is_kept=False) == expected


NOT_IMPORTED = """
import sys
from pathlib import Path
from models.config import ModelConfig
from models.loading.parameter_count import count_whole

assert count_whole(ModelConfig.from_folder(Path(sys.argv[1])))
assert "sympy" not in sys.modules
"""


def test_counting_the_whole_model_imports_nothing_slow(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", NOT_IMPORTED, tmp_path], cwd=root, check=True)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_a_model_on_ranks_counts_as_whole(variant, tmp_path):
    write_checkpoint(tmp_path, variant)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    assert count_whole(model.config) == count_parameters(model)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "deepseek_v3"])
def test_counting_needs_no_memory_for_positions(variant, tmp_path):
    write_checkpoint(tmp_path, variant)
    config = ModelConfig.from_folder(tmp_path)
    # Rotary tables of as many rows would not fit into any memory.
    assert count_whole(replace(config, max_position_embeddings=10**13)) == count_whole(config)
