"""The kernels of compressed attention in Triton's interpreter, on the CPU."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention.compressed import compressed_attention as kernels
from models.ops.attention import compressed_attention as operator
from tests.support.compressed_case import make_compressed_case
from tests.support.tolerances import assert_rows_close

operator.has_kernels = lambda device: True
taken = []
attend = kernels.attend
kernels.attend = lambda *arguments: taken.append(attend(*arguments))
original = kernels.takes

SIZES = {"num_heads": 5, "size": 48, "rope_dim": 8}
BATCHES = (
    ([1] * 4, [5, 1, 0, 170]), ([1, 7, 20, 1], [5, 7, 90, 32]), ([1], [300]), ([70], [70]),
)
KINDS = (
    (torch.float32, 0, None), (torch.float32, 4, 9), (torch.float16, 4, 9),
    (torch.float32, 4, 200), (torch.float32, 10, None), (torch.float16, 32, None),
)

def check(case):
    exact = case.exact()
    kernels.takes = lambda *arguments: False
    exact.run()
    kernels.takes = original
    output = case.run()
    kernels.takes = lambda *arguments: False
    expected = case.exact().run_reading()
    kernels.takes = original
    starts, lengths = case.metadata[0].query_start_loc, case.metadata[0].seq_lens
    live = lengths.repeat_interleave(starts.diff()) > 0
    assert_rows_close(output[live], expected[live])
    for ours, others in zip(case.caches, exact.caches, strict=True):
        assert_rows_close(ours.rows[1:], others.rows[1:])

num_cases = 0
for row, batch in enumerate(BATCHES):
    # Each kind has a batch of single tokens and one with chunks.
    for dtype, rate, top_k in KINDS[((row + 1) // 2 + FIRST) % 2 :: 2]:
        check(make_compressed_case(*batch, **SIZES, dtype=dtype, rate=rate, top_k=top_k))
        num_cases += 1
released = {"num_heads": 5, "size": 512, "rope_dim": 64}
rate, top_k = ((4, 9), (128, None))[FIRST]
check(make_compressed_case([1, 9], [60, 300], **released, rate=rate, top_k=top_k))
assert len(taken) == num_cases + 1 == 13

# The null block keeps its content, as others' graphs may read it.
case = make_compressed_case([1, 1], [9, 12], **SIZES, rate=4, top_k=3)
for metadata in case.metadata:
    metadata.block_tables.zero_()
before = [each.rows.clone() for each in case.caches]
case.run()
assert all(torch.equal(each.rows, old) for each, old in zip(case.caches, before, strict=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["one-half", "other-half"])
def test_kernels_agree_with_the_reference_in_the_interpreter(first):
    run_interpreted(f"FIRST = {first}\n{PROGRAM}")
