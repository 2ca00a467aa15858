"""Attention to chosen blocks against the reference on the CPU: dtypes, steps, a graph."""

import pytest
import torch

from tests.support.attention_case import Heads
from tests.support.block_sparse_case import make_block_sparse_case
from tests.support.invariance import batch_invariance
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

HEADS = {
    "minimax-m3": (Heads(num_heads=64, num_kv_heads=4, head_dim=128), 128),
    "a-rank-of-it": (Heads(num_heads=8, num_kv_heads=1, head_dim=128), 128),
    "odd": (Heads(num_heads=15, num_kv_heads=3, head_dim=48), 40),
}
INDEXES = {
    "released": {"block_size": 128, "top_blocks": 4, "local_blocks": 1},
    "small": {"block_size": 24, "top_blocks": 5, "local_blocks": 2},
    "all-chosen": {"block_size": 128, "top_blocks": 64, "local_blocks": 1},
}
BATCHES = {
    "decode": ([1] * 6, [1, 7, 16, 129, 1000, 2049]),
    "one": ([1], [3000]),
    "mixed": ([1, 7, 33, 1, 40], [1, 7, 300, 128, 1000]),
    "chunk": ([300], [900]),
}


@pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_output_and_cache_are_the_references(batch, heads, index, dtype):
    heads, index_dim = heads
    case = make_block_sparse_case(
        *batch, heads, **index, index_dim=index_dim, dtype=dtype, device="cuda"
    )
    exact = case.exact()
    expected, output = exact.run(), case.run()
    assert_rows_close(output, expected)
    stored = case.plain.cache.tensors(), exact.plain.cache.tensors()
    for name, ours in stored[0].items():
        assert_rows_close(ours[1:], stored[1][name][1:])


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_keys_of_8_bits_are_attended_as_the_cache_has_them(batch):
    heads, index_dim = HEADS["minimax-m3"]
    case = make_block_sparse_case(
        *batch, heads, **INDEXES["released"], index_dim=index_dim, dtype=torch.bfloat16,
        device="cuda", has_fp8_cache=True,
    )  # fmt: skip
    output = case.run()
    assert_rows_close(output, case.with_exact_keys().run())


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_token_has_the_bits_that_it_has_alone_in_batch_invariant_mode(batch, index):
    heads, index_dim = HEADS["minimax-m3"]
    case = make_block_sparse_case(
        *batch, heads, **index, index_dim=index_dim, dtype=torch.bfloat16, device="cuda"
    )
    with batch_invariance():
        whole = case.run()
        for token in range(0, len(whole), 7):
            assert torch.equal(case.alone(token).run()[0], whole[token])


@pytest.mark.parametrize("batch", ["decode", "one"])
def test_a_graph_repeats_the_step(batch):
    heads, index_dim = HEADS["minimax-m3"]
    case = make_block_sparse_case(
        *BATCHES[batch], heads, **INDEXES["released"], index_dim=index_dim, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    expected, output = case.run(), torch.zeros_like(case.plain.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
