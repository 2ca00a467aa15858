"""Ranks of a group that are streams of one GPU: their kernels run at the same time.

The process needs `CUDA_DEVICE_MAX_CONNECTIONS=32`: streams that share a queue wait for each other.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from models.kernels.products.fp8.fp8_linear import quantize
from models.kernels.ranks.exchange import Exchange, RankMissingError
from models.kernels.ranks.rank_memory import RankMemory, shape_of
from models.number_formats import BLOCK
from models.ops.ranks.all_reduce_norm import ordered_sum, ordered_sum_norm

CUDA = torch.device("cuda")
EPS = 1e-6
NUM_ROUNDS = 10
"""Replays of a graph with several calls of each collective."""


class RanksOnOneGPU:
    """The exchanges of all ranks, each with a stream; all ranks' programs fit at once."""

    def __init__(self, num_ranks, hidden, dtype, *, timeout_s=20.0):
        shape = shape_of(num_ranks, hidden, dtype)
        self.slots = [torch.zeros(shape, dtype=dtype, device=CUDA) for _ in range(num_ranks)]
        addresses = tuple(each.data_ptr() for each in self.slots)
        num_processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
        share = SimpleNamespace(
            multi_processor_count=num_processors // (2 * num_ranks), clock_rate=2_000_000
        )
        with mock.patch("torch.cuda.get_device_properties", return_value=share):
            self.exchanges = [
                Exchange(
                    RankMemory(
                        rank=rank,
                        slots=each,
                        addresses=addresses,
                        numbers=tuple(range(num_ranks)),
                        handle=None,
                    ),
                    timeout_s=timeout_s,
                )
                for rank, each in enumerate(self.slots)
            ]
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def capture(self, program):
        """Returns each rank's graph of `program(rank, exchange)`, and the programs' results.

        Nothing is allocated or loaded when graphs run: either could wait for another rank's kernel.
        """
        with self._without_waiting():
            self._run(program)
        graphs = [torch.cuda.CUDAGraph() for _ in self.streams]
        results = []
        for rank, (graph, stream) in enumerate(zip(graphs, self.streams, strict=True)):
            with torch.cuda.graph(graph, stream=stream):
                results.append(program(rank, self.exchanges[rank]))
        with self._without_waiting():
            self.replay(graphs)
        return graphs, results

    def replay(self, graphs):
        """Runs the graphs of all ranks at the same time."""
        for graph, stream in zip(graphs, self.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()

    def _run(self, program):
        for rank, (exchange, stream) in enumerate(zip(self.exchanges, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                program(rank, exchange)
        torch.cuda.synchronize()

    @contextmanager
    def _without_waiting(self):
        """Lets the block's calls pass as after a late rank; afterwards nothing has been sent."""
        for exchange in self.exchanges:
            exchange._missing.fill_(1)
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()
        for exchange, slots in zip(self.exchanges, self.slots, strict=True):
            for state in (exchange._missing, exchange._phases, slots):
                state.zero_()
        torch.cuda.synchronize()


def drawn(*shape, dtype):
    """Returns values, of which some are zeros of both signs."""
    values = torch.randn(*shape, device=CUDA).to(dtype)
    values[..., 2:6] = 0
    values[..., 8:11] = -0.0
    return values


def compare_with_torch(num_ranks, hidden, dtype, numbers_of_rows):
    """Compares all collectives with torch, bit by bit, for each number of rows, many times."""
    torch.manual_seed(num_ranks + hidden)
    ranks = RanksOnOneGPU(num_ranks, hidden, dtype)
    cases = [_Case(num_ranks, hidden, dtype, number) for number in numbers_of_rows]
    graphs, results = ranks.capture(
        lambda rank, exchange: [case.run(rank, exchange) for case in cases]
    )
    for _ in range(NUM_ROUNDS):
        for case in cases:
            case.renew_streams()
        torch.cuda.synchronize()
        ranks.replay(graphs)
        for exchange in ranks.exchanges:
            exchange.check()
        for number, case in enumerate(cases):
            case.check([each[number] for each in results])
    assert not any(each.count_nonzero() for each in ranks.slots)


def miss_a_rank():
    """Lets the first of two ranks call each collective alone; the other one is named."""
    x = drawn(6, 512, dtype=torch.bfloat16)
    for name in ("add_norm", "add_rounded_norm", "gather_rows", "reduce_scatter"):
        ranks = RanksOnOneGPU(2, 512, torch.bfloat16, timeout_s=0.2)
        collective = getattr(ranks.exchanges[0], name)
        arguments = (x, x.clone(), x[0], EPS) if "norm" in name else (x,)
        options = {"is_blocked": True} if "rounded" in name else {}
        for _ in range(3):
            collective(*arguments, **options)
        torch.cuda.synchronize()
        with pytest.raises(RankMissingError, match="rank 1 did not send its rows in time"):
            ranks.exchanges[0].check()
        ranks.exchanges[1].check()


class _Case:
    """Calls of every collective with one number of rows of each rank."""

    def __init__(self, num_ranks, hidden, dtype, num_rows):
        self._hidden = hidden
        self._parts = drawn(num_ranks, num_rows, hidden, dtype=dtype)
        self._residual = drawn(num_rows, hidden, dtype=dtype)
        self._weight = drawn(hidden, dtype=dtype)
        self._wide = drawn(num_ranks, num_ranks * num_rows, hidden, dtype=dtype)
        self._is_few = num_rows <= shape_of(num_ranks, hidden, dtype)[2]
        # Three sums of each rank, each with a residual stream of its own.
        self._streams = self._residual.repeat(num_ranks, 3, 1, 1)
        self._total = self._residual.clone()
        self._normed = ordered_sum_norm(self._parts, self._total, self._weight, EPS)
        self._shares = torch.stack(
            [ordered_sum(each) for each in self._wide.split(num_rows, 1)]
        ).to(dtype)

    def renew_streams(self):
        self._streams.copy_(self._residual.expand_as(self._streams))

    def run(self, rank, exchange):
        """Calls all collectives as a rank; returns their results."""
        x, streams, weight = self._parts[rank], self._streams[rank], self._weight
        assert exchange.fits(x, streams[0], weight)
        assert exchange.takes_rows(x.shape, x.dtype) == self._is_few
        rows = ()
        if self._is_few:
            rows = (exchange.gather_rows(x), exchange.reduce_scatter(self._wide[rank]))
        normed = exchange.add_norm(x, streams[0], weight, EPS)
        by_block = exchange.add_rounded_norm(x, streams[1], weight, EPS, is_blocked=True)
        by_token = exchange.add_rounded_norm(x, streams[2], weight, EPS, is_blocked=False)
        return normed, by_block, by_token, rows

    def check(self, results):
        """Compares the results of all ranks."""
        assert torch.equal(self._streams, self._total.expand_as(self._streams))
        first = results[0][0]
        torch.testing.assert_close(first.float(), self._normed.float(), rtol=2e-2, atol=2e-2)
        blocks, tokens = (quantize(first, group) for group in (BLOCK, self._hidden))
        for rank, (normed, by_block, by_token, rows) in enumerate(results):
            assert _same_bits(normed, first)
            for rounded, expected in ((by_block, blocks), (by_token, tokens)):
                assert _same_bits(rounded[0], expected[0])
                assert torch.equal(rounded[1], expected[1])
                assert rounded[1].stride(1) % 4 == 0
            if rows:
                assert _same_bits(rows[0], results[0][3][0])
                assert torch.equal(rows[0], self._parts.flatten(0, 1))
                assert torch.equal(rows[1], self._shares[rank])


def _same_bits(first, second):
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
