"""Vectors and scores of several ranks under the real scheduler: those of one rank."""

import json

import numpy as np
import pytest
import torch

from tests.support.pooled_engine import PooledEngine, save_tensors, write_pooling
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core

PROMPTS = [[(7 * i + 13 * n + i * i) % 97 for i in range(n)] for n in (1, 7, 33, 2, 50, 5, 64)]
LAYOUTS = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "stages of two": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "own requests": {"data_parallel_size": 2},
    "own requests of two": {"data_parallel_size": 2, "tensor_parallel_size": 2},
}
MODES = {
    "two ranks": "lasttoken",
    "two stages": "mean_tokens",
    "stages of two": "cls_token",
    "own requests": "mean_tokens",
    "own requests of two": "lasttoken",
}
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "cudagraph_piece_sizes": [8, 32],
    "capture_while_serving": False,
}
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def family_of(layout):
    """Only models with experts have ranks with requests of their own."""
    return "qwen3_moe" if layout.startswith("own") else "qwen3"


async def check(config, expected):
    """Compares vectors of prompts that run together, and of one while other ranks are idle."""
    async with ranks_core(config) as ranks:
        np.testing.assert_allclose(await ranks.embed(PROMPTS), expected, atol=TOLERANCE)
        for _ in range(2):
            found = await ranks.embed(PROMPTS[2:3])
            np.testing.assert_allclose(found, expected[2:3], atol=TOLERANCE)
        stats = ranks.core.stats()
    assert stats.load.num_used_blocks == 0
    assert not any(figures.fault for figures in stats.graphs.figures)
    return stats


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_vectors_are_those_of_one_rank(tmp_path, layout):
    write_checkpoint(tmp_path, family_of(layout))
    dense = [(torch.randn(24, 32), None, "activation.Tanh")]
    write_pooling(tmp_path, MODES[layout], is_normalized=True, dense=dense)
    expected = PooledEngine(tmp_path).embed(PROMPTS)
    await check(ranks_config(tmp_path, task="embed", **LAYOUTS[layout]), expected)


@pytest.mark.parametrize("layout", ["two ranks", "two stages", "own requests"])
async def test_scores_are_those_of_one_rank(tmp_path, layout):
    write_checkpoint(tmp_path, family_of(layout))
    # The tokens are in different shards of the head.
    tokenizer = {"model": {"vocab": {"yes": 91, "no": 17}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = PooledEngine(tmp_path, "score").embed(PROMPTS)
    assert len(np.unique(expected)) == len(PROMPTS)
    await check(ranks_config(tmp_path, task="score", **LAYOUTS[layout]), expected)


async def test_a_head_for_one_label_is_on_every_rank(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = model.model.state_dict(prefix="model.") | {"score.weight": torch.randn(1, 32)}
    save_tensors(stored, tmp_path / "model.safetensors")
    expected = PooledEngine(tmp_path, "score").embed(PROMPTS)
    await check(ranks_config(tmp_path, task="score", **LAYOUTS["stages of two"]), expected)


@pytest.mark.parametrize("layout", ["two ranks", "two stages", "own requests"])
async def test_chunks_prefixes_and_graphs_together(tmp_path, layout):
    write_checkpoint(tmp_path, family_of(layout))
    expected = PooledEngine(tmp_path).embed(PROMPTS)
    scarce = {"num_kv_blocks": 18, "max_num_batched_tokens": 8}
    config = ranks_config(tmp_path, task="embed", **scarce, **GRAPHS, **LAYOUTS[layout])
    stats = await check(config, expected)
    assert stats.counters.steps_by_dispatch()["graph"] > 0
    assert stats.counters.scheduler.cached_tokens > 0
