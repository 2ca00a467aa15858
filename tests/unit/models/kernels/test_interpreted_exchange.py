"""Collectives over memory of all ranks in Triton's interpreter; each rank is a process."""

import pytest

from tests.support.programs import run_interpreted

MEET = """
import multiprocessing
import sys
from types import SimpleNamespace

import torch
torch.set_num_threads(1)
from models.number_formats import BLOCK
from models.ops.ranks.all_reduce_norm import ordered_sum_norm
from models.ops.products.fp8_linear import quantize
from models.kernels.ranks import exchange
from models.kernels.ranks.exchange import Exchange, RankMissingError
from models.kernels.ranks.rank_memory import RankMemory
from tests.support.interpreted_words import interpret_words
from tests.support.interpreter_rounding import round_exactly

interpret_words()
round_exactly()
# A program has several rows; a cycle is a nanosecond.
properties = SimpleNamespace(multi_processor_count=2, clock_rate=10**6)
torch.cuda.get_device_properties = lambda device: properties
EPS = 1e-6
MOST_ROWS = 4

def memory_of(num_ranks, hidden, dtype):
    slots = torch.zeros(num_ranks, 2, num_ranks, MOST_ROWS, hidden, dtype=dtype).share_memory_()
    # Processes that fork have it at the same addresses.
    addresses = tuple(each.data_ptr() for each in slots)
    # As of a later pipeline stage.
    numbers = tuple(range(10, 10 + num_ranks))
    return [
        RankMemory(rank=rank, slots=each, addresses=addresses, numbers=numbers, handle=None)
        for rank, each in enumerate(slots)
    ]

def run(ranks, run_rank):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank,)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)

def drawn(seed, *shape, dtype):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values[..., 2:6] = 0
    values[..., 8] = -0.0
    return values
"""
PROGRAM = """
def run_rank(rank):
    own = Exchange(memory[rank], timeout_s=100)
    for call, num_rows in enumerate((1, 5)):
        parts = drawn(call, num_ranks, num_rows, hidden, dtype=dtype)
        residual = drawn(100 + call, num_rows, hidden, dtype=dtype)
        weight = drawn(200, hidden, dtype=dtype)
        assert own.fits(parts[rank], residual, weight)
        total = residual.clone()
        expected = ordered_sum_norm(parts, total, weight, EPS)
        stream = residual.clone()
        normed = own.add_norm(parts[rank], stream, weight, EPS)
        assert torch.equal(stream, total), call
        torch.testing.assert_close(normed, expected, rtol=1e-2, atol=1e-2)
        for is_blocked in (True, False):
            stream = residual.clone()
            rounded, scale = own.add_rounded_norm(
                parts[rank], stream, weight, EPS, is_blocked=is_blocked
            )
            assert torch.equal(stream, total), call
            expected, expected_scale = quantize(normed, BLOCK if is_blocked else hidden)
            assert torch.equal(rounded.float(), expected.float()), call
            assert torch.equal(scale, expected_scale), call
            assert scale.stride(1) % 4 == 0

def gather_and_share(rank):
    own = Exchange(memory[rank], timeout_s=100)
    for call, num_rows in enumerate((1, 4)):
        rows = drawn(300 + call, num_ranks, num_rows, hidden, dtype=dtype)
        assert own.takes_rows(rows[rank].shape, dtype)
        gathered = own.gather_rows(rows[rank])
        assert torch.equal(gathered, rows.flatten(0, 1)), call
        wide = drawn(400 + call, num_ranks, num_ranks * num_rows, hidden, dtype=dtype)
        # Not contiguous, and not at the address of a vector.
        odd = torch.empty(wide[0].numel() + 1, dtype=dtype)[1:].view(wide[0].shape)
        odd.copy_(wide[rank])
        share = own.reduce_scatter(odd if rank == 0 else wide[rank].t().contiguous().t())
        total = torch.zeros(num_ranks * num_rows, hidden)
        for part in wide:
            total += part.float()
        assert torch.equal(share, total.to(dtype).view(num_ranks, num_rows, hidden)[rank]), call
    assert not own.takes_rows((MOST_ROWS + 1, hidden), dtype)
    assert not own.takes_rows((1, hidden + 8), dtype)
    assert not own.takes_rows((1, hidden), torch.float32)

# The interpreter rounds to bfloat16 otherwise than a GPU.
num_ranks, hidden, dtype = int(sys.argv[1]), int(sys.argv[2]), torch.float16
memory = memory_of(num_ranks, hidden, dtype)
if num_ranks >= 4:
    exchange.TWO_SHOT_BYTES = {4: 3 * hidden * 2}
run(range(num_ranks), run_rank)
assert all(not each.slots.count_nonzero() for each in memory)
run(range(num_ranks), gather_and_share)
assert all(not each.slots.count_nonzero() for each in memory)
"""
LATE = """
def run_rank(rank):
    own = Exchange(memory[rank], timeout_s=0.5)
    x = drawn(0, 2, 16, dtype=torch.float16)
    own.check()
    for _ in range(2):
        getattr(own, sys.argv[1])(*((x, x.clone(), x[0], EPS) if "norm" in sys.argv[1] else (x,)))
    try:
        own.check()
    except RankMissingError as error:
        assert "rank 11 " in str(error), error
    else:
        raise AssertionError("rank 11 was not missed")

memory = memory_of(2, 16, torch.float16)
run((0,), run_rank)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "hidden"), [(2, 264), (3, 96), (4, 264)])
def test_ranks_get_the_bits_that_torch_computes(num_ranks, hidden):
    run_interpreted(MEET + PROGRAM, num_ranks, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["add_norm", "gather_rows", "reduce_scatter"])
def test_a_rank_that_does_not_take_part_is_named(collective):
    run_interpreted(MEET + LATE, collective)
