"""Layers with windows keep blocks of their own, and the model says the same."""

import pytest
import torch

from models.config import ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from services.engine.config.compilation_level import CompilationLevel
from services.engine.kv_cache.cache_groups import group_layers
from services.engine.worker.start.kv_memory import allocate_kv_cache, block_bytes
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(2, 4, 8)
)
PIECES = compilation_config(
    level=CompilationLevel.PIECEWISE,
    use_inductor=False,
    cudagraph_mode=CUDAGraphMode.PIECEWISE,
    cudagraph_capture_sizes=(8, 16, 64),
)


@pytest.fixture(
    scope="module",
    params=[
        "gpt_oss",
        "mistral_window",
        "qwen3_windows",
        "llama4",
        "llama4_odd",
        "mimo_v2",
        "mimo_v2_odd",
    ],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    engine = GraphEngine(folder, EAGER, has_groups=False, num_blocks=300)
    return engine.run(PROMPTS, 40)


@pytest.mark.parametrize("config", [EAGER, GRAPHS, PIECES], ids=["eager", "graphs", "pieces"])
def test_tokens_are_those_of_a_cache_that_keeps_everything(folder, expected, config, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, num_blocks=300)
    engine.capture()
    assert engine.run(PROMPTS, 40) == expected
    # Once more, with prefixes that were computed before.
    assert engine.run(PROMPTS, 40) == expected
    assert engine.faults == []
    assert engine.scheduler.num_free_blocks == 299
    assert engine.scheduler.counts.cached_tokens > 0


def test_few_blocks_cost_preemptions_and_no_token(folder, expected):
    windows = ModelConfig.from_folder(folder).sliding_windows
    num_usable = 12 * len(group_layers(windows, max_model_len=128))
    engine = GraphEngine(folder, EAGER, num_blocks=1 + num_usable, max_num_batched_tokens=8)
    assert engine.run(PROMPTS, 40) == expected
    # Windows alone never need more than was free when a request came in.
    assert bool(engine.scheduler.counts.num_preemptions) == (None in windows)
    assert engine.scheduler.num_free_blocks == num_usable


@pytest.mark.parametrize("level", [0, 3])
def test_drafts_by_lookup_cost_no_token(folder, expected, level, tmp_path):
    config = compilation_config(
        level=level, use_inductor=False, cudagraph_mode=CUDAGraphMode.NONE,
        compile_cache_dir=tmp_path,
    )  # fmt: skip
    drafts = {"num_speculative_tokens": 3, "lookup_sizes": (1, 2)}
    engine = GraphEngine(folder, config, num_blocks=300, max_num_batched_tokens=37, **drafts)
    assert engine.run(PROMPTS, 40) == expected
    assert engine.scheduler.num_free_blocks == 299


@pytest.mark.parametrize("dtype", [torch.float32, FP8_CACHE_DTYPE], ids=str)
def test_groups_share_their_memory(tmp_path, dtype):
    write_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=5)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    groups = group_layers(model.config.sliding_windows, max_model_len=64)
    assert [group.layers for group in groups] == [(1, 3), (0, 2), (4,)]
    sizes = {"block_size": 4, "dtype": dtype, "groups": groups}
    caches = allocate_kv_cache(model, num_blocks=5, device=CPU, **sizes)
    assert caches[0] is caches[1] is caches[4]
    assert caches[2] is caches[3] is not caches[0]
    tensors = [tensor for cache in caches[1:3] for tensor in cache.tensors().values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert num_bytes == 5 * block_bytes(model, **sizes)
