"""Models with latent attention answer the same whichever form a step's size chooses."""

import random

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kernels.attention.latent import latent_forms
from models.kernels.attention.latent.latent_forms import NEVER
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from models.ops.attention import expanded_attention, latent_attention
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

PROMPT = random.Random(1).choices(range(97), k=60)
LEAST = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "deepseek_v3")
    return folder


@pytest.fixture
def sizes_of_expanded(monkeypatch):
    """Lets chunks of LEAST tokens and more take the expanded form; collects their sizes."""
    seen = []

    def watched(queries, cache, group, *others):
        seen.append(group.num_queries)
        expanded_attention.attend_expanded(queries, cache, group, *others)

    monkeypatch.setattr(latent_attention, "least_expanded_queries", lambda sizes: LEAST)
    monkeypatch.setattr(latent_attention, "attend_expanded", watched)
    # A block at a time.
    monkeypatch.setattr(latent_forms, "MOST_EXPANDED_BYTES", 1)
    return seen


def test_a_prompts_logits_do_not_depend_on_its_chunks(folder, sizes_of_expanded):
    runner = PagedRunner(load_model(folder, device=torch.device("cpu"), dtype=torch.float32))
    expected = runner.run(runner.add(PROMPT), LEAST - 1)
    assert not sizes_of_expanded
    for chunk_size in (LEAST, 17, 60):
        logits = runner.run(runner.add(PROMPT), chunk_size)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert max(sizes_of_expanded) == chunk_size


def test_steps_may_mix_both_forms(folder, sizes_of_expanded):
    runner = PagedRunner(load_model(folder, device=torch.device("cpu"), dtype=torch.float32))
    expected = runner.run(runner.add(PROMPT), LEAST - 1)
    first, second, third = (runner.add(PROMPT) for _ in range(3))
    runner.step([(second, 9), (first, 30)])
    sizes_of_expanded.clear()
    steps = [(first, 1), (second, 21), (third, 3)]
    starts = [each.num_cached for each, _ in steps]
    for start, (_, count), logits in zip(starts, steps, runner.step(steps), strict=True):
        torch.testing.assert_close(logits, expected[start : start + count], rtol=1e-4, atol=1e-4)
    assert set(sizes_of_expanded) == {21}


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_tokens_are_those_of_the_absorbed_form_with_graphs_and_shared_prefixes(
    folder, sizes_of_expanded, monkeypatch, mode
):
    prompts = [PROMPT[:40], PROMPT[:29], PROMPT[:3], PROMPT[20:50]]

    def outputs():
        config = compilation_config(
            cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=(2, 4)
        )
        engine = GraphEngine(folder, config, max_num_batched_tokens=32)
        engine.capture()
        # Again, with prefixes that the cache holds.
        tokens = [engine.run(prompts, 6), engine.run(prompts, 6)]
        assert engine.faults == []
        return tokens

    tokens = outputs()
    assert sizes_of_expanded
    monkeypatch.setattr(latent_attention, "least_expanded_queries", lambda sizes: NEVER)
    assert outputs() == tokens


def test_a_cache_of_8_bits_changes_little_and_chunks_nothing(tmp_path):
    # Without experts, which a small change of a router's input exchanges.
    write_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=3)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)

    def run(chunk_size, cache_dtype=None):
        runner = PagedRunner(model, cache_dtype=cache_dtype)
        return runner.run(runner.add(PROMPT[:30]), chunk_size)

    single, whole, own = run(1, FP8_CACHE_DTYPE), run(30, FP8_CACHE_DTYPE), run(30)
    assert 0.01 < (whole - own).norm() / own.norm() < 0.25
    # A number near the middle of two may be rounded the other way, which is rare.
    assert (single - whole).norm() / own.norm() < 0.02


def test_cached_prefixes_keep_the_tokens_of_a_cache_of_8_bits(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v32", first_k_dense_replace=3)
    prompts = [PROMPT[:40], PROMPT[:33], PROMPT[20:]]
    config = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
    engine = GraphEngine(tmp_path, config, cache_dtype=FP8_CACHE_DTYPE)
    expected = engine.run(prompts, 6)
    # The second time the cache holds the prompts.
    num_cached = engine.scheduler.counts.cached_tokens
    assert engine.run(prompts, 6) == expected
    assert engine.scheduler.counts.cached_tokens > num_cached + 100
