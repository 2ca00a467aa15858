"""Several ranks under the real scheduler: the tokens of one."""

import os

import pytest
import torch

from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuation
from tests.support.step_driver import sampling as greedy_with

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8]]
NUM_TOKENS = 12
FAMILIES = {
    "llama_one_kv_head": 2,
    "qwen3": 2,
    "qwen3_moe": 4,
    "mixtral": 2,
    "gpt_oss": 4,
    "glm4_moe": 2,
    "deepseek_v2": 2,
    "deepseek_v3": 4,
}
"""Family -> number of ranks."""
PRODUCT = bool(os.environ.get("OCTAVO_TEST_ALL_RANKS"))
"""Tries all families with all numbers of ranks."""
CASES = [
    (family, size)
    for family, chosen in FAMILIES.items()
    for size in (2, 4)
    if PRODUCT or size == chosen
]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "size"), CASES)
async def test_ranks_give_the_tokens_of_transformers(tmp_path, family, size):
    reference = write_checkpoint(tmp_path, family)
    expected = [greedy_continuation(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
    config = ranks_config(tmp_path, tensor_parallel_size=size, max_num_batched_tokens=8)
    async with ranks_core(config) as ranks:
        tokens = await ranks.generate(PROMPTS, greedy_with(max_tokens=NUM_TOKENS))
        assert [each.rank for each in ranks.core.worker.ranks] == list(range(size))
    assert tokens == expected
