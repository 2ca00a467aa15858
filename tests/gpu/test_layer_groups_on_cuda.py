"""Layers with windows give blocks back, and a GPU says what it says when they keep them."""

import pytest

from models.cudagraph_mode import CUDAGraphMode
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
MODES = [
    CUDAGraphMode.NONE,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.FULL,
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "family", ["deepseek_v4", "gpt_oss", "llama4", "mimo_v2", "mistral_window"]
)
def test_tokens_are_those_of_a_cache_that_keeps_everything(tmp_path, family, mode):
    write_checkpoint(tmp_path, family)
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(2, 4, 8))
    options = {"device": "cuda", "num_blocks": 300}
    expected = GraphEngine(tmp_path, config, has_groups=False, **options).run(PROMPTS, 40)
    engine = GraphEngine(tmp_path, config, **options)
    engine.capture()
    assert engine.run(PROMPTS, 40) == expected
    assert engine.run(PROMPTS, 40) == expected
    assert engine.faults == []
    assert engine.scheduler.num_free_blocks == 299
