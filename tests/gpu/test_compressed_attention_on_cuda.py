"""Attention to compressed keys against the reference on the CPU: dtypes, steps, a graph."""

import pytest
import torch

from tests.support.compressed_case import make_compressed_case
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

SIZES = {
    "deepseek-v4": {"num_heads": 64, "size": 512, "rope_dim": 64, "window": 128},
    "a-rank-of-it": {"num_heads": 8, "size": 512, "rope_dim": 64, "window": 128},
    "odd": {"num_heads": 5, "size": 48, "rope_dim": 8},
}
KINDS = {
    "recent": {},
    "indexed": {"rate": 4, "top_k": 64},
    "all-chosen": {"rate": 4, "top_k": 512},
    "heavy": {"rate": 128},
}
BATCHES = {
    "decode": ([1] * 6, [1, 7, 16, 129, 1000, 2049]),
    "one": ([1], [3000]),
    "mixed": ([1, 7, 33, 1, 40], [1, 7, 300, 128, 1000]),
    "chunk": ([300], [700]),
}


@pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_output_and_caches_are_the_references(batch, sizes, kind, dtype):
    case = make_compressed_case(*batch, **sizes, **kind, dtype=dtype, device="cuda")
    exact = case.exact()
    exact.run()
    output = case.run()
    assert_rows_close(output, case.exact().run_reading())
    for ours, others in zip(case.caches, exact.caches, strict=True):
        assert_rows_close(ours.rows[1:], others.rows[1:])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_graph_repeats_the_step(kind):
    case = make_compressed_case(
        *BATCHES["decode"], **SIZES["deepseek-v4"], **kind, dtype=torch.bfloat16, device="cuda"
    )
    expected, output = case.run(), torch.zeros_like(case.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
