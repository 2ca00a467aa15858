"""A KV cache of 8 bits in the running engine: the model's tokens with it, and more blocks."""

import asyncio
import shutil

import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.paged_runner import PagedRunner
from tests.support.processes import start_engine
from tests.support.random_checkpoints import write_checkpoint

MEMORY_MB = 4
FLAGS = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_mb": MEMORY_MB,
    "cudagraph_mode": "full_decode_only",
    "capture_while_serving": False,
}
PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), [9] * 3]
NUM_OUTPUT = 32


def greedy(model, prompt):
    """Returns what the model says with a cache of 8 bits, without an engine."""
    runner = PagedRunner(model, block_size=16, cache_dtype=FP8_CACHE_DTYPE)
    sequence = runner.add(prompt)
    for _ in range(NUM_OUTPUT):
        logits = runner.run(sequence, 256)
        sequence.token_ids.append(int(logits[-1].argmax()))
    return sequence.token_ids[len(prompt) :]


async def serve(**flags):
    async with start_engine(**FLAGS, **flags) as engine, engine_stub(engine.address) as stub:
        calls = (
            generate(stub, prompt, max_tokens=NUM_OUTPUT, ignore_eos=True) for prompt in PROMPTS
        )
        replies = await asyncio.gather(*calls)
        return [reply.token_ids for reply in replies], await get_stats(stub)


async def test_tokens_are_the_models_and_blocks_are_smaller():
    _, plain = await serve()
    outputs, stats = await serve(kv_cache_dtype="fp8_e4m3")
    model = load_model(TINY_CHECKPOINT, device=torch.device("cpu"), dtype=torch.float32)
    assert outputs == [greedy(model, prompt) for prompt in PROMPTS]
    heads = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads
    head_dim = model.config.head_dim
    assert plain.num_blocks == MEMORY_MB * 2**20 // (16 * heads * 4 * head_dim)
    # A byte a number and a scale a head, instead of four bytes a number.
    assert stats.num_blocks == MEMORY_MB * 2**20 // (16 * heads * (head_dim + 4))
    assert all(graph.captured for graph in stats.graphs)
    assert stats.graph_dispatch["graph"] > NUM_OUTPUT // 2


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v32"])
async def test_tokens_are_those_of_a_model_with_latent_vectors_of_8_bits(variant, tmp_path):
    write_checkpoint(tmp_path, variant, max_position_embeddings=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, tmp_path)
    outputs, stats = await serve(model=tmp_path, kv_cache_dtype="fp8_e4m3")
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    assert outputs == [greedy(model, prompt) for prompt in PROMPTS]
    [bytes_per_token] = {spec.bytes_per_token(FP8_CACHE_DTYPE) for spec in model.cache_specs()}
    num_layers = model.config.num_hidden_layers
    assert stats.num_blocks == MEMORY_MB * 2**20 // (16 * num_layers * bytes_per_token)
    assert stats.graph_dispatch["graph"] > NUM_OUTPUT // 2
