"""Flags that a model's configuration rules out are refused without its weights."""

import subprocess
import sys

import pytest

from models.config import ModelConfig
from services.engine.config.engine_config import EngineConfig
from services.engine.model_fit import check_model_fit
from tests.support.random_checkpoints import write_checkpoint


def check(folder, variant, **flags):
    write_checkpoint(folder, variant)
    check_model_fit(EngineConfig.from_flags(**flags), ModelConfig.from_folder(folder))


@pytest.mark.parametrize(
    ("variant", "flags", "reason"),
    [
        ("qwen3", {"tensor_parallel_size": 3}, "--tensor-parallel-size is 3: .* heads cannot"),
        (
            "deepseek_v32",
            {"tensor_parallel_size": 64},
            "is 64: .* attention heads",
        ),
        ("qwen3", {"data_parallel_size": 2}, "--data-parallel-size 2 needs a model with experts"),
        (
            "qwen3",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2},
            "--enable-expert-parallel needs a model with experts",
        ),
        ("qwen3", {"pipeline_parallel_size": 50}, "too few for 50 pipeline stages"),
        (
            "qwen3",
            {"pipeline_parallel_size": 2, "pipeline_layers": [40, 2]},
            "stages of 40, 2 layers do not hold",
        ),
        ("deepseek_v32", {"batch_invariant": True}, "--batch-invariant does not cover attention"),
    ],
)
def test_flags_that_do_not_fit_the_model_are_refused(tmp_path, variant, flags, reason):
    with pytest.raises(ValueError, match=reason):
        check(tmp_path, variant, **flags)


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3", {"enable_expert_parallel": True}),
        ("qwen3_moe", {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
        ("deepseek_v32", {"data_parallel_size": 2}),
    ],
)
def test_flags_that_fit_the_model_pass(tmp_path, variant, flags):
    check(tmp_path, variant, **flags)


def test_the_engine_refuses_them_before_it_listens_or_starts_a_rank():
    engine = [sys.executable, "-m", "services.engine", "--port", "0", "--device", "cpu"]
    flags = ["--tensor-parallel-size", "3"]
    ended = subprocess.run([*engine, *flags], capture_output=True, text=True, check=False)
    problem = "octavo engine: --tensor-parallel-size is 3: "
    assert (ended.returncode, ended.stderr[: len(problem)]) == (2, problem)
    assert len(ended.stderr.splitlines()) == 1
