"""Models whose layers keep states: with a scheduler, the tokens of a model that runs alone."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from services.engine.config.compilation_level import CompilationLevel
from services.engine.kv_cache.cache_groups import group_layers
from services.engine.worker.start.kv_memory import allocate_kv_cache, block_bytes
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.invariance import batch_invariance
from tests.support.random_checkpoints import write_checkpoint
from tests.support.requests import make_request
from tests.support.state_variants import STATE_VARIANTS

CPU = torch.device("cpu")
LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
PROMPTS = [LONG[:3], LONG[:100], LONG[50:115], LONG[:70] + LONG[120:150], LONG[5:6], LONG[:130]]
NUM_OUTPUT = 24
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
SIZES = {"max_model_len": 256, "block_size": 16, "num_blocks": 400, "max_num_batched_tokens": 256}


BY_DEFAULT = ("falcon_h1", "mamba2", "qwen3_5_odd")
"""Variants with each kind of state, with and without keys beside it."""


@pytest.fixture(
    scope="module",
    params=[
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.families)
        for name in sorted(STATE_VARIANTS)
        if name != "granite_hybrid_dense"  # has no state
    ],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param, max_position_embeddings=256)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Each prompt's output in an engine of its own."""
    outputs = []
    for prompt in PROMPTS:
        outputs += GraphEngine(folder, EAGER, **SIZES).run([prompt], NUM_OUTPUT)
    return outputs


@pytest.mark.parametrize("config", [EAGER, GRAPHS, PIECES], ids=["eager", "graphs", "pieces"])
def test_tokens_are_those_of_requests_alone(folder, expected, config, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    engine = GraphEngine(folder, config, **SIZES)
    engine.capture()
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    counts = engine.scheduler.counts
    num_cached = counts.cached_tokens
    # Once more, from the snapshots of before.
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert counts.cached_tokens - num_cached >= 3 * 64
    assert engine.faults == []
    assert engine.scheduler.num_free_blocks == SIZES["num_blocks"] - 1


@pytest.mark.parametrize("max_num_batched_tokens", [5, 37])
def test_chunks_of_prompts_change_no_token(folder, expected, max_num_batched_tokens):
    sizes = SIZES | {"max_num_batched_tokens": max_num_batched_tokens}
    assert GraphEngine(folder, EAGER, **sizes).run(PROMPTS, NUM_OUTPUT) == expected


def test_few_blocks_cost_preemptions_and_no_token(folder, expected):
    pages = GraphEngine(folder, EAGER, **SIZES).limits.num_state_blocks
    sizes = SIZES | {"num_blocks": 1 + 10 + 3 * pages, "max_num_batched_tokens": 40}
    engine = GraphEngine(folder, EAGER, **sizes)
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert engine.scheduler.num_free_blocks == sizes["num_blocks"] - 1


def test_a_later_turn_starts_from_the_output(folder):
    engine = GraphEngine(folder, EAGER, **SIZES)
    [output] = engine.run([LONG[:100]], 60)
    turn = LONG[:100] + output + LONG[:9]
    [again] = engine.run([turn], 8)
    assert engine.scheduler.counts.cached_tokens == 128
    assert GraphEngine(folder, EAGER, **SIZES).run([turn], 8) == [again]


def test_an_output_goes_on_in_another_engine(folder, expected):
    """Tokens are all that travels; the state is computed again, or found at a snapshot."""
    prompt, output = PROMPTS[1], expected[1]
    other = GraphEngine(folder, EAGER, **SIZES)
    for num_done in (1, 12, 23):
        request = make_request(prompt, resumed_token_ids=output[:num_done], max_tokens=NUM_OUTPUT)
        other._complete([request])
        assert output[:num_done] + request.sink.token_ids == output
    assert other.scheduler.counts.num_snapshots_used == 2
    assert other.scheduler.num_free_blocks == SIZES["num_blocks"] - 1


@pytest.mark.parametrize("max_num_batched_tokens", [23, 256])
def test_batch_invariant_logits_of_a_resumed_request_have_the_bits_of_a_cold_one(
    folder, max_num_batched_tokens
):
    def logprobs(engine):
        engine.run([LONG[:130]], 8, logprobs=5)
        results = [result for _, result in engine.steps if result.logprobs]
        return [result.logprobs for result in results], [r.token_ids for r in results]

    sizes = SIZES | {"max_num_batched_tokens": max_num_batched_tokens, "dtype": torch.bfloat16}
    with batch_invariance():
        cold = logprobs(GraphEngine(folder, EAGER, **sizes))
        warm = GraphEngine(folder, EAGER, **sizes)
        warm.run([LONG[:110], LONG[:90]], 30)
        warm.steps.clear()
        assert logprobs(warm) == cold
        assert warm.scheduler.counts.cached_tokens >= 64


def test_layers_of_both_kinds_share_memory(folder):
    model = load_model(folder, device=CPU, dtype=torch.float32)
    windows = model.config.cache_windows
    groups = group_layers(windows, max_model_len=256)
    sizes = {"block_size": 16, "dtype": torch.float32, "groups": groups}
    caches = allocate_kv_cache(model, num_blocks=5, device=CPU, **sizes)
    kinds = [cache.tensors() for cache in caches]
    # Rotated elements of latent attention lie apart.
    shared = {next(iter(each.values())).untyped_storage().data_ptr() for each in kinds}
    storages = [tensor.untyped_storage() for each in kinds for tensor in each.values()]
    memory = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert len(shared) == max(len(group.layers) for group in groups)
    assert sum(memory.values()) == 5 * block_bytes(model, **sizes)
