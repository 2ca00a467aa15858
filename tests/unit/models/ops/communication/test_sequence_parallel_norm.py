"""Sums over ranks whose rows the ranks share: the results of all_reduce_norm, on all ranks."""

import pytest
import torch

from models.ops.batch_invariance import use_batch_invariance
from models.ops.communication import sequence_parallel_norm as operators
from models.ops.linear import (  # noqa: F401  # registers them
    linear_reduce_scatter,
    sequence_parallel_norm_linear,
)
from models.parallel import collectives
from models.parallel.collectives import without_other_ranks
from tests.support.gloo_ranks import run_ranks

SUMS = """
from models.number_formats import FP8
from models.ops.communication import sequence_parallel_norm as operators
from models.ops.communication.all_reduce_norm import all_reduce_norm
from models.ops.linear.all_reduce_norm_linear import all_reduce_norm_linear
from models.ops.linear.fp8_linear import quantize
from models.ops.linear.linear import linear
from models.ops.linear.linear_reduce_scatter import linear_reduce_scatter
from models.ops.linear.sequence_parallel_norm_linear import (
    gather_rounded, sequence_parallel_norm_linear,
)
from models.parallel.collectives import own_rows, reduce_scatter_rows

operators.SHARE_BYTES = 1
GROUP = "tensor_parallel"
weight = torch.linspace(0.5, 2, 256)
common = (weight, 1e-6, GROUP, False)
product = torch.linspace(-2, 2, 16 * 256).view(16, 256).to(FP8)
scale = torch.linspace(0.5, 1, 16).view(16, 1)
results = []
for num_rows in (1, 2, 3, 7, 127):
    draws = torch.Generator().manual_seed(num_rows)
    first, residual = (torch.randn(num_rows, 256, generator=draws) for _ in range(2))
    x, second = first.roll(rank, -1), first.roll(rank + 9, -1)
    whole, before = residual.clone(), residual.clone()
    outputs = []
    # Later norms read rows that earlier ones of other ranks have changed.
    for added in (x, second):
        outputs.append(operators.sequence_parallel_norm(added, residual, *common))
        torch.testing.assert_close(
            outputs[-1], all_reduce_norm(added, whole, weight, 1e-6, GROUP), rtol=1e-5, atol=1e-5
        )
    own = operators.current_rows(residual, GROUP)
    is_shared = num_rows > (size - 1) ** 2
    assert (own == slice(num_rows)) != is_shared
    if is_shared:
        assert own == own_rows(num_rows, GROUP)
        assert own.stop > own.start
        others = [row for row in range(num_rows) if not own.start <= row < own.stop]
        assert torch.equal(residual[others], before[others])
    for is_gated in (False, True):
        following = (product, None, is_gated, scale)
        outputs.append(sequence_parallel_norm_linear(x, residual, *common, *following))
        expected = all_reduce_norm_linear(x, whole, weight, 1e-6, GROUP, *following)
        torch.testing.assert_close(outputs[-1], expected, rtol=1e-4, atol=1e-4)
    # A product whose sum begins before its end, with a bias on one rank.
    inner = (first[:, :40].roll(rank, 0), torch.randn(256, 40, generator=draws))
    inner = (*inner, None if rank else weight, None)
    summed = linear_reduce_scatter(*inner, GROUP)
    outputs.append(
        operators.sequence_parallel_norm(summed, residual, weight, 1e-6, GROUP, True)
    )
    expected = all_reduce_norm(linear(*inner), whole, weight, 1e-6, GROUP)
    torch.testing.assert_close(outputs[-1], expected, rtol=1e-4, atol=1e-4)
    operators.gather_residual(residual, GROUP)
    torch.testing.assert_close(residual, whole, rtol=1e-4, atol=1e-4)
    for group_size in (128, 256):
        rounded = quantize(first, group_size)
        share = own_rows(num_rows, GROUP)
        gathered = gather_rounded(*(each[share] for each in rounded), num_rows, GROUP)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(gathered, rounded))
    assert torch.equal(
        reduce_scatter_rows(torch.ones(num_rows, 3), GROUP),
        torch.full((share.stop - share.start, 3), float(size)),
    )
    results.append([residual, *outputs])
"""


@pytest.mark.parametrize("size", [2, 4])
def test_shared_rows_give_the_sums_and_the_same_bits_on_all_ranks(tmp_path, size):
    first, *others = run_ranks(SUMS, size, tmp_path)
    for other in others:
        for pairs in zip(first, other, strict=True):
            assert all(map(torch.equal, *pairs))


STREAM = """
from models.ops.communication import sequence_parallel_norm as operators
from models.ops.communication.all_reduce import all_reduce
from models.ops.elementwise.rms_norm import rms_norm
from services.engine.config.passes import DEFAULT_PASSES
from tests.support.compiled_models import Toy, compile_toy

operators.SHARE_BYTES = 1
weight = torch.linspace(0.5, 2, 8)


def body(self, x):
    \"\"\"Two layers; the last sum has no norm, as where a pipeline stage ends.\"\"\"
    stream, kept = x * 2, []
    for layer in range(2):
        normed = rms_norm(stream, weight, 1e-6)
        stream = stream + all_reduce(normed * (rank + layer + 1), "tensor_parallel")
        if not layer:
            kept.append(stream)
        stream = stream + all_reduce(rms_norm(stream, weight, 1e-6).sin(), "tensor_parallel")
    return torch.cat((stream, *kept), -1)


results = []
for level in (2, 3):
    toy, compiled = Toy(body), Toy(body)
    passes = [*DEFAULT_PASSES, "sequence_parallel"]
    matches = compile_toy(compiled, level, width=8, passes=passes).pass_matches
    assert matches["all_reduce_norm"] == matches["sequence_parallel"] == 3, matches
    for num_rows in (1, 2, 7, 127):
        x = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(num_rows))
        results.append(compiled.forward(x.clone()))
        torch.testing.assert_close(results[-1], body(toy, x), rtol=1e-5, atol=1e-5)
"""


def test_other_readers_of_the_stream_get_all_rows(tmp_path):
    first, second = run_ranks(STREAM, 2, tmp_path)
    assert all(map(torch.equal, first, second))


class Fused:
    """A fused sum that fits nothing."""

    def fits(self, x, residual, weight):
        return False


@pytest.fixture
def two_ranks(monkeypatch):
    """The second of two ranks, as far as the choice goes."""
    monkeypatch.setattr(operators, "num_ranks", lambda group: 2)
    monkeypatch.setattr(operators, "own_rows", lambda num_rows, group: slice(num_rows // 2, None))
    monkeypatch.setattr(collectives, "_fused", {})


ENOUGH = 2 * operators.SHARE_BYTES // (1024 * 2)


@pytest.mark.parametrize(("num_rows", "is_shared"), [(ENOUGH - 1, False), (ENOUGH, True)])
def test_the_bound_is_bytes_of_a_share(two_ranks, num_rows, is_shared):
    residual = torch.empty(num_rows, 1024, dtype=torch.bfloat16)
    assert operators.shares_rows(residual, "some") == is_shared
    start = num_rows // 2 if is_shared else None
    assert operators.current_rows(residual, "some").start == start


def test_no_rows_are_shared_beside_a_fused_sum_or_alone_or_invariantly(two_ranks):
    residual = torch.empty(ENOUGH, 1024, dtype=torch.bfloat16)
    with without_other_ranks():
        assert not operators.shares_rows(residual, "some")
    use_batch_invariance(is_on=True)
    try:
        assert not operators.shares_rows(residual, "some")
    finally:
        use_batch_invariance(is_on=False)
    assert operators.shares_rows(residual, "some")
    collectives.use_fused_sum("some", Fused())
    assert not operators.shares_rows(residual, "some")


def test_the_operators_have_the_schemas_of_what_they_do():
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    norm = (x, x.clone(), x[0], 1e-6, "absent", False)
    with without_other_ranks():
        for operator, arguments in (
            (torch.ops.octavo.sequence_parallel_norm, norm),
            (torch.ops.octavo.gather_residual, (x.clone(), "absent")),
            (torch.ops.octavo.sequence_parallel_norm_linear, (*norm, weight, None, True)),
            (torch.ops.octavo.linear_reduce_scatter, (x, weight, None, None, "absent")),
        ):
            torch.library.opcheck(operator.default, arguments)
