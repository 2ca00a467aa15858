"""Attention of few queries of each request to a cache of 8 bits, against the float64 reference."""

import pytest
import torch

from models.kernels.attention.decode.few_queries import most_few_queries
from tests.support.attention_case import AttentionCase, Heads, make_case
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

HEADS = {
    f"group-of-{group}": Heads(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    for group, head_dim in ((1, 128), (2, 64), (3, 96), (4, 128), (5, 128), (7, 64), (8, 64))
}
HEADS["qwen3-8b"] = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
HEADS["one-kv-head"] = Heads(num_heads=64, num_kv_heads=1, head_dim=128)
QWEN3_8B = HEADS["qwen3-8b"]
BATCHES = {
    "draft": ([5], [9005]),
    "drafts": ([3] * 6, [16003, 700, 1030, 3, 5000, 1027]),
    "many-drafts": ([5, 4, 3, 2] * 12, [60 * i + 7 for i in range(48)]),
    "short-messages": ([2, 31, 32, 7, 20], [2, 3000, 777, 12000, 63]),
    "beside-others": ([1, 4, 150, 0, 33, 300, 1], [40, 12000, 1150, 0, 2056, 300, 5000]),
    "absent": ([0] * 9 + [7] + [0] * 290 + [1, 40, 0], [0] * 9 + [78] + [0] * 290 + [20, 4000, 0]),
}


def make(batch, heads, **options) -> AttentionCase:
    options = {"dtype": torch.bfloat16, "device": "cuda", "has_fp8_cache": True, **options}
    case = make_case(*batch, heads, **options)
    assert most_few_queries(case.q, case.cache, case.metadata.workspace) > 0
    case.leave_window()
    return case.with_chunks()


def run(case: AttentionCase) -> torch.Tensor:
    output = case.run()
    assert case.metadata.workspace.counters.count_nonzero() == 0
    return output


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 33, "has_sinks": True},
        {"sliding_window": 4000, "has_sinks": True},
        {"sliding_window": -33, "has_sinks": True},
        {"sliding_window": -1000},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_few_queries_see_their_keys_at_any_length(batch, heads, options):
    case = make(batch, heads, **options)
    output = run(case)
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("options", [{"soft_cap": 1.5}, {"dtype": torch.float16}], ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_soft_caps_and_float16(batch, options):
    case = make(batch, QWEN3_8B, **options)
    output = run(case)
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 128, 256])
def test_blocks_of_any_size(block_size):
    case = make(BATCHES["drafts"], QWEN3_8B, block_size=block_size)
    output = run(case)
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_few_queries_repeat_bit_for_bit(batch, heads):
    case = make(batch, heads)
    output = run(case)
    for _ in range(20):
        assert torch.equal(run(case), output)
