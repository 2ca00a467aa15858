"""Every compilation level with every graph mode: the tokens of eager steps, on a CPU."""

import pytest

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import FallbackReason
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [70] * 17]
NUM_OUTPUT = 7
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED


@pytest.fixture(scope="module")
def expected(folder):
    return GraphEngine(folder, compilation_config()).run(PROMPTS, NUM_OUTPUT)


@pytest.mark.parametrize("mode", CUDAGraphMode, ids=str)
@pytest.mark.parametrize("level", CompilationLevel)
def test_tokens_are_those_of_eager_steps(folder, expected, level, mode):
    config = compilation_config(
        level=level, use_inductor=False, cudagraph_mode=mode, cudagraph_capture_sizes=(4, 64)
    )
    engine = GraphEngine(folder, config)
    assert {outcome.fault for outcome in engine.capture()} <= {""}
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    if level == CompilationLevel.DYNAMO_AS_IS or not mode:
        # Dynamo takes part in every step of level 1, which cannot be taped.
        assert engine.prepared.mode is CUDAGraphMode.NONE
        assert RAN_GRAPH not in engine.reasons
    elif mode.mixed_mode():
        assert set(engine.reasons) == {RAN_GRAPH}
    else:
        assert RAN_GRAPH in engine.reasons
