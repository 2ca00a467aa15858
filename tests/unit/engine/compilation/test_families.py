"""Every family of models compiles and is recorded like the one the other tests use."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from tests.support.compilation import compilation_config
from tests.support.compiled_models import compile_at
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

FAMILIES = [
    "qwen3_moe",
    "mixtral_window",
    "gpt_oss",
    "glm4_moe_groups",
    "deepseek_v3",
    "deepseek_v32",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "phi3_long",
    "qwen2_windows",
    *(
        pytest.param(name, marks=pytest.mark.families)
        for name in (
            *("deepseek_v4", "deepseek_v4_odd", "hy_v4", "hy_v4_odd"),
            *("cohere2", "gemma4_moe", "gemma4_shared", "glm_moe_dsa_shared", "llama4"),
            *("llama4_odd", "mimo_v2", "mimo_v2_odd", "minimax_m2", "minimax_m3"),
        )
    ),
]
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12]]
NUM_OUTPUT = 9


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param)
    return folder


def outputs(folder, **options):
    driver = StepDriver(folder, **options)
    first, second, third = (driver.add(prompt) for prompt in PROMPTS)
    driver.step([(first, 3)])
    driver.step([(first, 1), (second, 4), (third, 1)])
    driver.step([(second, 6), (third, 1), (first, 1)])
    driver.decode([first, second, third], NUM_OUTPUT)
    return [each.output for each in (first, second, third)]


def test_pieces_give_the_tokens_of_eager(folder):
    assert outputs(folder, prepare=compile_at(3)) == outputs(folder)


def test_recorded_decode_steps_give_the_tokens_of_eager(folder):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(1, 2, 4)
    )
    recorded = GraphEngine(folder, config)
    assert [outcome.fault for outcome in recorded.capture()] == [""] * 3
    eager = GraphEngine(folder, compilation_config())
    assert recorded.run(PROMPTS, NUM_OUTPUT) == eager.run(PROMPTS, NUM_OUTPUT)
