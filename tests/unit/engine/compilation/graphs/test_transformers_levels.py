"""Models that run as modules of transformers, at each level and with each kind of graph."""

import random

import pytest

from services.engine.config.compilation import CompilationConfig
from tests.support.foreign_checkpoints import generate, write_foreign_checkpoint
from tests.support.graph_engine import GraphEngine

NUM_OUTPUT = 10
ARCHITECTURES = (
    "StableLmForCausalLM",
    "CohereForCausalLM",
    "Starcoder2ForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "PhiForCausalLM",
    "NemotronForCausalLM",
    "OlmoeForCausalLM",
)
MODES = ("full", "piecewise", "none")


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    shared = draw.choices(range(97), k=12)
    lengths = (1, 5, 17, 30)
    others = [draw.choices(range(97), k=length) for length in lengths]
    return [*others, [*shared, 3], [*shared, 4]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def make(architecture: str):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            model = write_foreign_checkpoint(folder, architecture)
            made[architecture] = folder, [generate(model, each, NUM_OUTPUT) for each in prompts()]
        return made[architecture]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "level"),
    [
        ("StableLmForCausalLM", 0),
        ("StableLmForCausalLM", 1),
        ("StableLmForCausalLM", 2),
        *((architecture, 3) for architecture in ARCHITECTURES),
    ],
)
def test_greedy_tokens_are_those_of_transformers_at_each_level(architecture, level, checkpoints):
    folder, expected = checkpoints(architecture)
    config = CompilationConfig(compilation_level=level, use_inductor=False)
    # Few blocks: some requests are preempted and start again.
    engine = GraphEngine(folder, config, max_model_len=64, num_blocks=48, max_num_batched_tokens=24)
    assert engine.run(prompts(), NUM_OUTPUT) == expected
    engine.capture()
    assert not engine.faults
    assert engine.run(prompts(), NUM_OUTPUT) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers_with_each_kind_of_graph(mode, checkpoints):
    folder, expected = checkpoints("StableLmForCausalLM")
    engine = GraphEngine(folder, CompilationConfig(cudagraph_mode=mode), max_model_len=64,
                         num_blocks=64)  # fmt: skip
    outcomes = engine.capture()
    assert (len(outcomes) > 0) == (mode != "none")
    assert not engine.faults
    assert engine.run(prompts(), NUM_OUTPUT) == expected
