"""Real models over few blocks: with the host's memory the tokens of an engine without it."""

import random

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint

EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
SIZES = {"max_model_len": 128, "block_size": 4, "num_blocks": 48}
STATES = {"max_model_len": 256, "block_size": 16, "num_blocks": 20, "num_states": 7}
CASES = {
    "qwen3": {},
    "gemma3": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "falcon_h1": STATES,
    "mamba2": STATES | {"num_blocks": 2},
    "qwen3_5_odd": STATES,
}
NUM_ROUNDS = 8


def prompts_of(order: random.Random, documents) -> list[list[int]]:
    """Beginnings of some documents, some of which go on in their own way."""
    prompts = []
    for _ in range(4):
        document = order.choice(documents)
        own = [order.randrange(90) for _ in range(order.choice([0, 0, 3]))]
        prompts.append(document[: order.randrange(len(document) // 2, len(document))] + own)
    return prompts


def outputs(folder, length, *, num_rounds=NUM_ROUNDS, **options):
    """Returns the tokens of requests in rounds, and the engine that made them."""
    engine = GraphEngine(folder, EAGER, **options)
    order = random.Random(5)
    documents = [[order.randrange(90) for _ in range(length)] for _ in range(10)]
    tokens = [engine.run(prompts_of(order, documents), 6) for _ in range(num_rounds)]
    return tokens, engine


def compare(folder, length, **options):
    expected, _ = outputs(folder, length, **options)
    found, engine = outputs(folder, length, num_host_slots=600, **options)
    assert found == expected
    counts = engine.scheduler.counts.tiers
    assert counts.num_stored > 20
    assert counts.hit_tokens > 100
    assert engine.scheduler.num_free_blocks == engine.cache[0].num_blocks - 1


@pytest.mark.parametrize("variant", CASES)
def test_the_tokens_are_those_of_an_engine_that_computes_all(tmp_path, variant):
    sizes = SIZES | CASES[variant]
    write_checkpoint(tmp_path, variant, max_position_embeddings=sizes["max_model_len"])
    compare(tmp_path, 40 if "num_states" not in sizes else 200, **sizes)


def test_a_cache_of_8_bits_comes_back_with_its_scales(tmp_path):
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=128)
    compare(tmp_path, 40, cache_dtype=FP8_CACHE_DTYPE, **SIZES)


def test_drafts_are_verified_against_blocks_that_came_back(tmp_path):
    write_mtp_checkpoint(tmp_path, "qwen3_5", agreement=0.98, max_position_embeddings=256)
    compare(
        tmp_path, 200, num_speculative_tokens=2, min_speculative_tokens=2,
        **(STATES | {"num_states": 3}),
    )  # fmt: skip


@pytest.mark.parametrize("num_rounds", [40, 500])
def test_hundreds_and_thousands_of_requests_over_few_blocks(tmp_path, num_rounds):
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=128)
    torch.set_num_threads(1)
    compare(tmp_path, 40, num_rounds=num_rounds, **SIZES)
