"""Steps of single tokens after sequences of unequal lengths against the float64 reference."""

import pytest
import torch

from tests.support.attention_case import AttentionCase, Heads, make_case
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

HEADS = {
    "qwen3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "group-of-16": Heads(num_heads=32, num_kv_heads=2, head_dim=128),
    "group-of-5": Heads(num_heads=10, num_kv_heads=2, head_dim=128),
    "one-kv-head": Heads(num_heads=8, num_kv_heads=1, head_dim=64),
    "no-grouping": Heads(num_heads=16, num_kv_heads=16, head_dim=64),
    "heads-of-256": Heads(num_heads=4, num_kv_heads=2, head_dim=256),
    "heads-of-512": Heads(num_heads=8, num_kv_heads=1, head_dim=512),
}
BATCHES = {
    "alone": [9000],
    "dozen": [1000] * 10 + [257, 3100],
    "few": [3000, 30, 40, 1, 500, 2, 700, 0],
    "last": [17] * 30 + [4000],
    "two": [2000] + [300] * 60 + [5000],
    "many": [9000, 1025] + [20] * 299,
    "hundreds": [9000] + [20] * 199,
    "dummies": [0] * 200 + [6000, 1, 129] + [0] * 53,
    "equal": [1000] * 24,
}
MIXED = {
    "long": ([1, 100, 1, 0, 1, 2], [9000, 130, 40, 0, 1, 2]),
    "absent": (
        [0] * 90 + [1, 33] + [0] * 100 + [1] * 4,
        [0] * 90 + [5000, 6000] + [0] * 100 + [7] * 4,
    ),
    "many": ([1] * 70 + [300] + [1] * 70, [257] * 69 + [7000, 300, 4000] + [31] * 69),
}
"""Tokens and lengths of requests in steps with chunks."""


CACHES = pytest.mark.parametrize("has_fp8_cache", [False, True], ids=["plain", "fp8-cache"])


def make(lengths, heads, **options) -> AttentionCase:
    return make_case(
        [1] * len(lengths), lengths, heads, device="cuda", has_spare_blocks=False, **options
    )


def run(case: AttentionCase) -> torch.Tensor:
    output = case.run()
    assert case.metadata.workspace.counters.count_nonzero() == 0
    return output


def check(case: AttentionCase) -> None:
    """Compares what the step's kernel returns with the reference; absent requests get zeros."""
    live = case.metadata.seq_lens.cpu() > 0
    # An 8-bit cache holds a rounded newest key, which the reference reads.
    expected = None if case.cache.k_scale is not None else case.exact().run()
    case.leave_window()
    output = run(case)
    if expected is None:
        expected = case.exact_reading().run()
    assert_rows_close(output[live.cuda()], expected[live])
    assert output[~live.cuda()].count_nonzero() == 0


@CACHES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_long_sequences_beside_short_ones(lengths, heads, has_fp8_cache):
    check(make(lengths, heads, dtype=torch.bfloat16, has_fp8_cache=has_fp8_cache))


@CACHES
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sliding_window", [128, 300, 1500, -300, None])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_windows_and_sinks(lengths, sliding_window, dtype, has_fp8_cache):
    options = {"dtype": dtype, "sliding_window": sliding_window, "has_sinks": True}
    check(make(lengths, HEADS["group-of-5"], has_fp8_cache=has_fp8_cache, **options))


@CACHES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", MIXED.values(), ids=MIXED)
def test_long_sequences_beside_chunks(batch, heads, has_fp8_cache):
    options = {"dtype": torch.bfloat16, "has_fp8_cache": has_fp8_cache, "device": "cuda"}
    case = make_case(*batch, heads, has_spare_blocks=False, **options)
    if has_fp8_cache:
        output = run(case)
        expected = case.exact_reading().run()
    else:
        expected = case.exact().run()
        output = run(case)
    assert_rows_close(output, expected)
    for _ in range(5):
        assert torch.equal(run(case), output)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sliding_window", [128, 300, 1500, -300])
@pytest.mark.parametrize("batch", MIXED.values(), ids=MIXED)
def test_windows_and_sinks_beside_chunks(batch, sliding_window, dtype):
    options = {"dtype": dtype, "sliding_window": sliding_window, "has_sinks": True}
    case = make_case(*batch, HEADS["group-of-5"], device="cuda", has_spare_blocks=False, **options)
    expected = case.exact().run()
    case.leave_window()
    assert_rows_close(run(case), expected)


@CACHES
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_parts_of_unequal_sequences_repeat_bit_for_bit(lengths, has_fp8_cache):
    case = make(lengths, HEADS["qwen3-8b"], dtype=torch.bfloat16, has_fp8_cache=has_fp8_cache)
    output = run(case)
    for _ in range(20):
        assert torch.equal(run(case), output)


@CACHES
def test_other_lengths_in_a_recorded_step_have_the_bits_of_a_step_of_their_own(has_fp8_cache):
    lengths = [5000] * 40
    case = make(lengths, HEADS["qwen3-8b"], dtype=torch.bfloat16, has_fp8_cache=has_fp8_cache)
    output = torch.empty(case.q.shape, dtype=case.q.dtype, device="cuda")
    case.run_into(output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    for others in ([5000] + [40] * 39, [300] * 20 + [4000, 10] * 10, lengths):
        case.metadata.seq_lens.copy_(torch.tensor(others))
        graph.replay()
        assert torch.equal(output, run(case))
