"""Kernels that communicate are used only if they give the bits of torch and no rank is late."""

import pytest
import torch

from models.ops.ranks.all_reduce_norm import ordered_sum_norm
from models.parallel.collectives import LostPeerError, without_other_ranks
from models.parallel.group import ParallelGroup
from services.engine.worker.start.exchange_check import rows_fault, sums_fault

ROWS = (24, torch.float16, torch.device("cpu"))
GROUP = ParallelGroup(rank=1, size=2)


class Exact:
    """Collectives of two ranks with equal tensors, in torch; up to 7 rows travel."""

    error = None

    def add_norm(self, x, residual, weight, eps):
        return ordered_sum_norm(torch.stack([x, x]), residual, weight, eps)

    def takes_rows(self, shape, dtype):
        return shape[0] <= 7 and dtype is torch.float16

    def gather_rows(self, x):
        return x.repeat(2, 1)

    def reduce_scatter(self, x):
        return (x[len(x) // 2 :].float() * 2).to(x.dtype)

    def check(self):
        if self.error:
            raise LostPeerError(self.error)


class WrongSum(Exact):
    def add_norm(self, x, residual, weight, eps):
        normed = super().add_norm(x, residual, weight, eps)
        residual[-1, -1] += 1
        return normed


class WrongNorm(Exact):
    def add_norm(self, x, residual, weight, eps):
        return super().add_norm(x, residual, weight, eps) * 1.1


class WrongGather(Exact):
    def gather_rows(self, x):
        return super().gather_rows(x).flip(-1)


class WrongShare(Exact):
    def reduce_scatter(self, x):
        return super().reduce_scatter(x).flip(-1)


class Late(Exact):
    error = "rank 0 did not send its rows in time"

    def takes_rows(self, shape, dtype):
        return False


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with without_other_ranks():
        yield


@pytest.mark.parametrize(
    ("fused", "fault"),
    [
        (Exact(), ""),
        (WrongSum(), "a sum of 1 rows is wrong"),
        (WrongNorm(), "a norm of 1 rows is wrong"),
        (Late(), "rank 0 did not send its rows in time"),
    ],
)
def test_sums_are_compared(fused, fault):
    assert sums_fault(fused, GROUP, *ROWS, roundings=()) == fault


@pytest.mark.parametrize(
    ("fused", "fault"),
    [
        (Exact(), ""),
        (WrongGather(), "the gathered 1 rows of each rank are wrong"),
        (WrongShare(), "the sums of 1 rows of each rank are wrong"),
        (Late(), "rank 0 did not send its rows in time"),
    ],
)
def test_gathers_and_shares_of_sums_are_compared(fused, fault):
    assert rows_fault(fused, GROUP, *ROWS) == fault
