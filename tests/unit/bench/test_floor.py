"""Floors of public shapes, against what their papers and configurations say."""

import json
from dataclasses import replace

import pytest
import torch

from models.config import ModelConfig
from tests.bench.floor import BYTES_PER_MS, FLOP_PER_MS, step_floor
from tests.bench.model_folder import read_shape


def floor_of(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(read_shape(shape)))
    return step_floor(ModelConfig.from_folder(tmp_path), torch.bfloat16)


# All parameters, and the ones that a token uses, in billions, without the embedding.
@pytest.mark.parametrize(
    ("shape", "all_params", "active_params"),
    [
        ("llama-3.1-8b", 7.50, 7.50),
        ("llama-3.1-8b-w4a16", 7.50, 7.50),
        ("llama-3.1-8b-w8a16", 7.50, 7.50),
        ("mixtral-8x7b", 46.6, 12.7),
        ("qwen3-30b-a3b", 30.2, 3.0),
        ("gpt-oss-20b", 20.3, 3.61),
        ("glm-4.5-air", 106.2, 12.0),
        ("gpt-oss-120b", 116.2, 5.13),
        ("gemma-4-31b", 30.7, 30.7),
        ("gemma-4-26b-a4b", 25.2, 3.8),
        ("glm-5", 743.0, 40.0),
        ("minimax-m2", 228.1, 10.0),
        ("minimax-m3", 424.9, 24.7),
        ("ministral-14b", 12.8, 12.8),
        ("deepseek-v3", 670.1, 36.6),
        ("deepseek-v4-flash", 283.8, 13.0),
    ],
)
def test_parameters_are_those_of_the_public_models(shape, all_params, active_params, tmp_path):
    floor = floor_of(shape, tmp_path)
    head = floor.head_params
    total = floor.dense_params + floor.expert_params + head
    share = floor.top_k / floor.num_experts
    active = floor.dense_params + floor.expert_params * share + head
    assert total / 1e9 == pytest.approx(all_params, rel=0.01)
    assert active / 1e9 == pytest.approx(active_params, rel=0.1)


def test_a_dense_model_reads_its_weights_and_the_cache(tmp_path):
    floor = floor_of("llama-3.1-8b", tmp_path)
    one, many = floor.decode_ms(1, 1000), floor.decode_ms(9, 1000)
    assert one == pytest.approx((7.50e9 * 2 + 131072 * 1000) / BYTES_PER_MS, rel=0.01)
    assert many - one == pytest.approx(8 * 131072 * 1000 / BYTES_PER_MS)
    assert floor.prefill_ms(8192) == pytest.approx(2 * 8192 * 6.98e9 / FLOP_PER_MS, rel=0.01)


def test_weights_of_4_bits_count_as_they_are_stored(tmp_path):
    packed, plain = (floor_of(shape, tmp_path) for shape in ("llama-3.1-8b-w4a16", "llama-3.1-8b"))
    # The head is not packed; 128 weights share a scale of two bytes.
    assert packed.dense_bytes == pytest.approx(6.98e9 * (0.5 + 2 / 128) + 0.525e9 * 2, rel=1e-3)
    assert packed.prefill_ms(8192) == plain.prefill_ms(8192)


def test_a_batch_reads_only_the_experts_that_it_touches(tmp_path):
    floor = floor_of("qwen3-30b-a3b", tmp_path)
    assert floor.weight_bytes(1) == pytest.approx(floor.dense_bytes + floor.expert_bytes / 16)
    touched = (floor.weight_bytes(32) - floor.dense_bytes) / floor.expert_bytes
    assert touched == pytest.approx(1 - (15 / 16) ** 32)
    assert floor.weight_bytes(4096) == pytest.approx(floor.dense_bytes + floor.expert_bytes)


# The 90 scales of 2880 weights take 96 bytes.
@pytest.mark.parametrize(
    ("shape", "bytes_per_param"), [("gpt-oss-20b", 0.53333), ("deepseek-v3", 1.000244)]
)
def test_experts_count_as_they_are_stored(shape, bytes_per_param, tmp_path):
    # With biases, where there are any.
    floor = floor_of(shape, tmp_path)
    assert floor.expert_bytes / floor.expert_params == pytest.approx(bytes_per_param, rel=2e-3)


def test_a_window_bounds_what_is_read_of_the_cache(tmp_path):
    floor = floor_of("gpt-oss-20b", tmp_path)
    cache_ms = (floor.decode_ms(1, 1000) - floor.weight_bytes(1) / BYTES_PER_MS) * BYTES_PER_MS
    # Every other of 24 layers sees 128 tokens.
    assert cache_ms == pytest.approx(2048 * (12 * 128 + 12 * 1000), rel=1e-3)


def test_compressed_keys_are_read_as_entries_and_by_an_index(tmp_path):
    floor = floor_of("deepseek-v4-flash", tmp_path)
    recent, index, chosen = 43 * 128 * 1024, 21 * 256, 21 * 1024
    # 20 layers have an entry for 128 tokens; 21 have one for 4 and read all keys of the index.
    assert floor.cache_bytes(1024) == recent + 256 * (index + chosen) + 20 * 8 * 1024
    assert floor.cache_bytes(8192) == recent + 2048 * index + 512 * chosen + 20 * 64 * 1024


def test_an_index_bounds_what_is_read_of_latent_vectors(tmp_path):
    floor = floor_of("glm-5", tmp_path)
    assert floor.cache_bytes(1000) == 78 * 1000 * (1152 + 256)
    assert floor.cache_bytes(5000) == 78 * (2048 * 1152 + 5000 * 256)


def test_an_index_bounds_what_is_read_of_keys_and_values(tmp_path):
    floor = floor_of("minimax-m3", tmp_path)
    assert floor.cache_bytes(1000) == 1000 * (60 * 2048 + 57 * 256)
    assert floor.cache_bytes(5000) == 5000 * (3 * 2048 + 57 * 256) + 57 * 2048 * 2048


@pytest.mark.parametrize(
    ("window", "pairs"),
    [
        (None, 1 + 2 + 3 + 4 + 5),
        (2, 1 + 2 + 2 + 2 + 2),
        (5, 1 + 2 + 3 + 4 + 5),
        (9, 1 + 2 + 3 + 4 + 5),
    ],
)
def test_each_query_of_a_prompt_is_multiplied_with_the_keys_that_it_sees(window, pairs, tmp_path):
    floor = replace(floor_of("llama-3.1-8b", tmp_path), cached=[(1.0, window)], pair_flop=3)
    assert floor.prompt_attention_flop(5) == 3 * pairs


@pytest.mark.parametrize(
    ("shape", "flop"),
    [("llama-3.1-8b", 4 * 32 * 128), ("deepseek-v3", 2 * 128 * (128 + 64 + 128))],
)
def test_a_pair_costs_the_products_of_all_heads(shape, flop, tmp_path):
    assert floor_of(shape, tmp_path).pair_flop == flop
