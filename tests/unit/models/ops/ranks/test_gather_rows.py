import pytest
import torch

from models.ops.ranks.gather_rows import gather_rows, reduce_scatter
from models.parallel import collectives
from models.parallel.collectives import LostPeerError, check_arrivals, without_other_ranks


class FewRows:
    """Kernels for up to two rows of three features; a rank is late."""

    def takes_rows(self, shape, dtype):
        return tuple(shape) in ((1, 3), (2, 3)) and dtype == torch.float16

    def gather_rows(self, x):
        return x.repeat(2, 1) + 1

    def reduce_scatter(self, x):
        return x[: len(x) // 2] + 2

    def check(self):
        raise LostPeerError("rank 1 did not send its rows in time")


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(collectives, "_fused_rows", {})
    collectives.use_fused_rows("some", FewRows())


def test_few_rows_travel_by_the_kernels_of_the_group(few_rows):
    x = torch.ones(2, 3, dtype=torch.float16)
    before = collectives.num_issued()
    assert torch.equal(gather_rows(x, "some", 2), torch.full((4, 3), 2.0, dtype=x.dtype))
    assert torch.equal(reduce_scatter(x, "some", 2), torch.full((1, 3), 3.0, dtype=x.dtype))
    assert collectives.num_issued() == before + 2
    with pytest.raises(LostPeerError, match="rank 1"):
        check_arrivals()


def test_without_other_ranks_no_kernel_runs(few_rows):
    x = torch.ones(2, 3, dtype=torch.float16)
    with without_other_ranks():
        assert torch.equal(gather_rows(x, "some", 2), x.repeat(2, 1))
        assert torch.equal(reduce_scatter(x, "some", 2), x[:1])


@pytest.mark.parametrize("x", [torch.ones(6, 3).half(), torch.ones(4, 3)], ids=["many", "float32"])
def test_other_rows_travel_by_the_library(few_rows, monkeypatch, x):
    calls = []

    def library(name):
        return lambda output, x, group: calls.append((name, output.shape[-2:], group))

    from models.ops.ranks import gather_rows as operators

    for name in ("gather_into", "reduce_scatter_into"):
        monkeypatch.setattr(operators, name, library(name))
    gather_rows(x, "some", 2)
    reduce_scatter(x, "some", 2)
    assert calls == [
        ("gather_into", x.shape, "some"),
        ("reduce_scatter_into", (len(x) // 2, 3), "some"),
    ]


def test_collectives_without_other_ranks_keep_their_shapes():
    x = torch.arange(6.0).view(2, 3)
    with without_other_ranks():
        gathered = gather_rows(x, "nobody", 3)
        assert torch.equal(gathered, x.repeat(3, 1))
        assert torch.equal(reduce_scatter(gathered, "nobody", 3), x)


def test_collectives_are_operators_with_fakes():
    x = torch.ones(6, 3)
    with without_other_ranks():
        torch.library.opcheck(torch.ops.octavo.gather_rows.default, (x, "nobody", 2))
        torch.library.opcheck(torch.ops.octavo.reduce_scatter.default, (x, "nobody", 2))
