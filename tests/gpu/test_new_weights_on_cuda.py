"""New weights under captured graphs: the tokens are the new model's."""

import pytest

from services.engine.core.weights import Running
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling
from tests.unit.engine.worker.test_weights import PROMPTS, Case, updated

pytestmark = pytest.mark.gpu

NUM_TOKENS = 12
OPTIONS = {
    "device": "cuda",
    "block_size": 16,
    "num_kv_blocks": 128,
    "capture_while_serving": False,
    "cudagraph_capture_sizes": [1, 2, 4, 32],
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


async def tokens_of(ranks):
    """One request after the other, so that no sum depends on what else is in a step."""
    params = sampling(max_tokens=NUM_TOKENS)
    return [await ranks.generate([prompt], params) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3", {}, {"dtype": "float32"}),
        ("qwen3", WIDE, {"dtype": "bfloat16", "quantization": "fp8"}),
        ("qwen3_moe", {}, {"dtype": "float32"}),
    ],
)
async def test_graphs_captured_before_give_the_new_models_tokens(tmp_path, family, sizes, options):
    case = Case(tmp_path, family, **sizes)
    flags = {**OPTIONS, **options}
    async with ranks_core(case.config(**flags)) as ranks:
        first = await tokens_of(ranks)
        num_graphs = ranks.core.stats().graphs.num_planned
        assert num_graphs
        await updated(ranks, "1")
        second = await tokens_of(ranks)
        await updated(ranks, "2", running=Running.RECOMPUTE)
        third = await tokens_of(ranks)
        dispatched = ranks.core.counters.steps_by_dispatch()
        assert dispatched.get("graph", 0) > 0
    for tokens, version in ((second, "1"), (third, "2")):
        config = ranks_config(tmp_path / "weights" / version, **flags)
        async with ranks_core(config) as ranks:
            assert tokens == await tokens_of(ranks)
    assert first not in (second, third)
