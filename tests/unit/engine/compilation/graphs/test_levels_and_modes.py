"""Every compilation level with every graph mode: the tokens of eager steps, on a CPU."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.layers.attention import Attention
from models.loading.loader import load_model
from models.ops.attention.cudagraph_support import AttentionCGSupport as Support
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


@pytest.mark.parametrize(
    ("support", "mode", "kinds"),
    [
        (Support.UNIFORM_SINGLE_TOKEN_DECODE, CUDAGraphMode.FULL_AND_PIECEWISE, {1, 3}),
        (Support.UNIFORM_BATCH, CUDAGraphMode.FULL_AND_PIECEWISE, {1, 3}),
        (Support.NEVER, CUDAGraphMode.PIECEWISE, {3}),
    ],
)
def test_one_layer_whose_attention_supports_less_decides_the_graphs(
    folder, expected, support, mode, kinds
):
    class OtherAttention(Attention):
        """Attention that no graph of a step with prompts may contain."""

        def cudagraph_support(self, device, cache_dtype):
            return support

    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    layer = [module for module in model.modules() if isinstance(module, Attention)][-1]
    layer.__class__ = OtherAttention
    config = compilation_config(cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=(4, 64))
    engine = GraphEngine(folder, config, model=model)
    assert engine.prepared.mode is mode
    assert support.name in engine.prepared.choice.reason
    assert {int(key.kind) for key in engine.prepared.graphs.planned} == kinds
    assert {outcome.fault for outcome in engine.capture()} == {""}
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert set(engine.reasons) == {RAN_GRAPH}
