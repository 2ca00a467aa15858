"""Flags that a model's configuration rules out are refused without its weights."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from models.loading.model_config import read_model_config
from services.engine.config.engine_config import EngineConfig
from services.engine.model_fit import check_model_fit
from tests.support.random_checkpoints import write_checkpoint
from tests.support.vision_variants import write_vision_checkpoint

ODD_SIZES = {
    "mistral_explicit_head": {"max_position_embeddings": 4},
    "llama": {"intermediate_size": 57},
    "qwen3_moe": {"moe_intermediate_size": 13},
}


def without_attention(folder):
    """Leaves fields out that published models without attention do not have."""
    fields = json.loads((folder / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    kept = {name: value for name, value in fields.items() if name not in names}
    (folder / "config.json").write_text(json.dumps(kept))


def check(folder, variant, **flags):
    write_checkpoint(folder, variant, **ODD_SIZES.get(variant, {}))
    if variant == "mamba2":
        without_attention(folder)
    config = EngineConfig.from_flags(**flags)
    check_model_fit(config, read_model_config(folder, config.checkpoint.model_impl))


@pytest.mark.parametrize(
    ("variant", "flags", "reason"),
    [
        ("qwen3", {"tensor_parallel_size": 3}, "--tensor-parallel-size is 3: .* heads cannot"),
        (
            "deepseek_v32",
            {"tensor_parallel_size": 64},
            "is 64: .* attention heads",
        ),
        (
            "qwen3_moe",
            {"tensor_parallel_size": 2},
            "is 2: 13 inner features of an expert cannot",
        ),
        (
            "qwen3",
            {"tensor_parallel_size": 2, "model_impl": "transformers"},
            "--tensor-parallel-size 2 does not cover transformers' modules",
        ),
        (
            "qwen3",
            {"pipeline_parallel_size": 2, "model_impl": "transformers"},
            "--pipeline-parallel-size 2 does not cover transformers' modules",
        ),
        (
            "mistral_explicit_head",
            {"num_speculative_tokens": 4},
            "tokens is 4: it must be less than 4, the",
        ),
        ("llama", {"tensor_parallel_size": 4}, "is 4: 57 inner features cannot"),
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
        ("qwen3_5_odd", {"tensor_parallel_size": 2}, "is 2: 3 key heads of a state cannot"),
        ("falcon_h1_odd", {"tensor_parallel_size": 2}, "is 2: 5 heads of a state cannot"),
        (
            "nemotron_h_moe",
            {"pipeline_parallel_size": 2},
            "stage 1 has layers 3 to 4, none of which caches anything",
        ),
        ("hy_v4", {"batch_invariant": True}, "--batch-invariant does not cover compressed keys"),
        ("deepseek_v4", {"batch_invariant": True}, "does not cover compressed keys and hyper"),
        ("deepseek_v4", {"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3 does not cover DeepseekV4"),
        ("deepseek_v4", {"data_parallel_size": 2}, "--data-parallel-size does not cover Deep"),
        ("deepseek_v4", {"kv_events": True}, "--kv-events does not cover DeepseekV4ForCausalLM"),
        ("deepseek_v4", {"host_kv_gb": 1.0}, "--host-kv-gb does not cover DeepseekV4ForCausalLM"),
        (
            "deepseek_v4",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2},
            "--enable-expert-parallel does not cover DeepseekV4ForCausalLM",
        ),
        (
            "deepseek_v4",
            {"num_speculative_tokens": 2, "draft_model": "draft"},
            "--draft-model does not cover DeepseekV4ForCausalLM",
        ),
        ("deepseek_v4", {"tensor_parallel_size": 4}, "is 4: 2 groups of heads cannot"),
        (
            "mamba2",
            {"num_speculative_tokens": 2, "draft_model": "draft"},
            "--draft-model does not cover Mamba2ForCausalLM: none of its layers keeps keys",
        ),
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
        ("mamba2", {"tensor_parallel_size": 2}),
        ("nemotron_h_moe", {"pipeline_parallel_size": 2, "pipeline_layers": [2, 3]}),
    ],
)
def test_flags_that_fit_the_model_pass(tmp_path, variant, flags):
    check(tmp_path, variant, **flags)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max_num_batched_tokens": 15}, "--max-num-batched-tokens is 15; it must be 16 or more"),
        ({"batch_invariant": True}, "--batch-invariant does not cover images of Gemma3"),
        ({"max_num_batched_tokens": 16}, None),
        ({"max_num_batched_tokens": 15, "language_model_only": True}, None),
        ({"batch_invariant": True, "language_model_only": True}, None),
    ],
)
def test_images_that_one_step_computes_need_room(tmp_path, flags, reason):
    write_vision_checkpoint(tmp_path, "gemma3")
    config = EngineConfig.from_flags(**{"max_num_seqs": 8} | flags)
    sees_images = not config.images.language_model_only
    model = read_model_config(tmp_path, config.checkpoint.model_impl, sees_images=sees_images)
    with nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        check_model_fit(config, model)


def test_the_engine_refuses_them_before_it_listens_or_starts_a_rank():
    engine = [sys.executable, "-m", "services.engine", "--port", "0", "--device", "cpu"]
    flags = ["--tensor-parallel-size", "3"]
    ended = subprocess.run([*engine, *flags], capture_output=True, text=True, check=False)
    problem = "octavo engine: --tensor-parallel-size is 3: "
    assert (ended.returncode, ended.stderr[: len(problem)]) == (2, problem)
    assert len(ended.stderr.splitlines()) == 1
