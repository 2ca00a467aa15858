"""Batch-invariant data-parallel ranks: the bits of a request do not depend on the others."""

import pytest
import torch

from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import greedy_continuations
from tests.support.step_driver import sampling as greedy_with

PROMPTS = [[5, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9], [5, 17, 3, 8], [7] * 20]
NUM_TOKENS = 5
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "cudagraph_piece_sizes": [8],
    "capture_while_serving": False,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


async def outcomes(ranks, prompts):
    """Returns the tokens of requests that run together, with their log-probabilities."""
    sampling = greedy_with(max_tokens=NUM_TOKENS, logprobs=2)
    sinks = [ranks.submit(prompt, sampling) for prompt in prompts]
    for sink in sinks:
        assert (await sink.wait_for_end()).error is None
    return [
        (sink.token_ids, [each for output in sink.outputs for each in output.logprobs])
        for sink in sinks
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"data_parallel_size": 3, "max_num_batched_tokens": 8}),
        ("gpt_oss", {"data_parallel_size": 2, **GRAPHS}),
        ("glm4_moe", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["copies of experts", "graphs", "two processes each"],
)
async def test_requests_have_the_same_bits_alone_and_together(tmp_path, family, options):
    reference = write_checkpoint(tmp_path, family)
    expected = greedy_continuations(reference, PROMPTS, NUM_TOKENS)
    flags = {"batch_invariant": True, "enable_prefix_caching": False, **options}
    async with ranks_core(ranks_config(tmp_path, **flags)) as ranks:
        alone = [(await outcomes(ranks, [prompt]))[0] for prompt in PROMPTS]
        assert [tokens for tokens, _ in alone] == expected
        for order in (1, -1):  # requests meet others, on other ranks
            assert await outcomes(ranks, PROMPTS[::order]) == alone[::order]
        if options.keys() >= GRAPHS.keys():
            assert ranks.core.stats().counters.steps_by_dispatch()["graph"] > 0
