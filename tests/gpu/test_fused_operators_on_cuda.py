"""Operators that passes insert, against float64, where the number of tokens changes the kernel."""

from dataclasses import replace

import pytest
import torch

from tests.support.stream_case import OPERATORS, make_stream_case
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

BORDERS = (1, 2, 3, 8, 63, 64, 65, 511, 512, 2048)
WAYS = {
    "plain": {},
    "bias": {"has_bias": True},
    "gate": {"is_gated": True},
    "gate and bias": {"is_gated": True, "has_bias": True},
}
# Hidden, attended and inner features of Qwen3-0.6B and 8B, and sizes that fit no tile.
SIZES = [(1024, 2048, 3072), (4096, 4096, 6144), (1600, 1600, 320), (99, 40, 7)]


def guarded(case):
    """Returns the case with its stream between other rows, and all of them."""
    rows = torch.full((len(case.residual) + 2, case.residual.shape[1]), 7.0).to(case.residual)
    rows[1:-1] = case.residual
    return replace(case, residual=rows[1:-1]), rows


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_operators_are_their_parts_at_every_border(size, way, operator):
    if operator == "gated_linear" and "gate" not in way:
        return
    for num_tokens in BORDERS:
        case = make_stream_case(num_tokens, *size, **WAYS[way], device="cuda")
        exact = case.exact().unfused(operator)
        for actual, expected in zip(case.fused(operator), exact, strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                assert actual.dtype == case.x.dtype
                # A row of a few elements may nearly cancel after the rounded norm and the gate.
                assert_rows_close(actual, expected, 0.06 if expected.shape[-1] < 64 else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_other_dtypes_have_the_same_operators(operator, dtype):
    for num_tokens in BORDERS:
        case = make_stream_case(num_tokens, 192, 96, 160, is_gated=True, dtype=dtype, device="cuda")
        exact = case.exact().unfused(operator)
        for actual, expected in zip(case.fused(operator), exact, strict=True):
            if actual is not None:
                assert_rows_close(actual, expected, ROW_TOLERANCE[dtype] * 4)


@pytest.mark.parametrize(
    "operator", [name for name in OPERATORS if "resid" in name or "add" in name]
)
@pytest.mark.parametrize("num_tokens", BORDERS)
def test_the_stream_changes_in_place_and_nothing_around_it(num_tokens, operator):
    drawn = make_stream_case(num_tokens, 1024, 2048, 3072, device="cuda")
    output, total = drawn.fused(operator)
    for _ in range(20):
        case, rows = guarded(drawn)
        actual = case.fused_in_place(operator)
        assert (actual is None) == (output is None)
        assert actual is None or torch.equal(actual, output)
        assert torch.equal(rows[1:-1], total)
        assert bool((rows[[0, -1]] == 7).all())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64, 65, 512])
def test_a_product_of_the_stream_itself_reads_it_before_it_changes(num_tokens):
    case = make_stream_case(num_tokens, 1024, 1024, 64, device="cuda")
    same = replace(case, x=case.residual)
    exact = same.exact().unfused("linear_residual")[1]
    same.fused_in_place("linear_residual")
    assert_rows_close(same.residual, exact)
