"""The kernels of attention to chosen blocks in Triton's interpreter, on the CPU."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention.block_sparse import block_choice, block_sparse_attention
from models.ops.attention import block_sparse_attention as operator
from tests.support.attention_case import Heads
from tests.support.block_sparse_case import make_block_sparse_case
from tests.support.tolerances import assert_rows_close

operator.has_kernels = lambda device: torch.get_default_dtype() != torch.float64
# Keys of the fewest tokens are split, those of others are not.
block_sparse_attention._PROGRAMS = 60

def reference(case):
    torch.set_default_dtype(torch.float64)
    output = case.run()
    torch.set_default_dtype(torch.float32)
    return output

def check(case):
    exact = case.exact()
    expected, output = reference(exact), case.run()
    if case.plain.cache.k_scale is not None:
        expected = reference(case.with_exact_keys())
    live = case.is_live
    assert_rows_close(output[live], expected[live])
    if case.plain.cache.k_scale is None:
        for ours, others in zip(
            case.plain.cache.tensors().values(), exact.plain.cache.tensors().values(), strict=True
        ):
            assert_rows_close(ours[1:], others[1:])

OF_8_BITS = Heads(num_heads=6, num_kv_heads=2, head_dim=32)
SIZES = Heads(num_heads=6, num_kv_heads=3, head_dim=24)
BATCHES = ([1] * 4, [5, 1, 0, 170]), ([1, 3, 18, 1], [5, 3, 90, 120])
for batch in BATCHES:
    for dtype in (torch.float32, torch.float16):
        check(make_block_sparse_case(*batch, SIZES, dtype=dtype))
    check(make_block_sparse_case(*batch, SIZES, block_size=7, top_blocks=1))
    check(make_block_sparse_case(*batch, OF_8_BITS, has_fp8_cache=True, dtype=torch.float16))
    # All blocks are chosen: the kernels of other attention run.
    check(make_block_sparse_case(*batch, SIZES, top_blocks=8))
for local_blocks in (0, 3):
    check(make_block_sparse_case(*BATCHES[0], SIZES, local_blocks=local_blocks))
for num_heads, head_dim in ((16, 128), (80, 16)):
    heads = Heads(num_heads=num_heads, num_kv_heads=1, head_dim=head_dim)
    sizes = {"index_dim": head_dim, "block_size": 32, "top_blocks": 2}
    check(make_block_sparse_case([1, 9], [60, 150], heads, **sizes))

# Scores of long steps are made in runs of tokens.
case = make_block_sparse_case(*BATCHES[1], SIZES)
whole = case.run()
block_choice.MOST_SCORES = 70
assert torch.equal(case.run(), whole)
"""


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_the_interpreter():
    run_interpreted(PROGRAM)
