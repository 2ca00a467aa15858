"""Operators that passes insert, against the operators that layers call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.products.linear_residual import linear_residual, linear_residual_norm_linear
from tests.support.stream_case import EPS, OPERATORS, make_stream_case

SIZES = st.integers(1, 70)


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 600),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    has_bias=st.booleans(),
    is_gated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_fused_operator_is_its_parts(operator, num_tokens, sizes, has_bias, is_gated, dtype):
    is_gated |= operator == "gated_linear"
    case = make_stream_case(num_tokens, *sizes, has_bias=has_bias, is_gated=is_gated, dtype=dtype)
    kept = case.residual.clone()
    for actual, expected in zip(case.fused(operator), case.unfused(operator), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert actual.dtype == dtype
            assert torch.equal(actual, expected)
    assert torch.equal(case.residual, kept)


def test_a_product_of_the_stream_itself_reads_it_before_it_changes():
    case = make_stream_case(5, 24, 24, 24, dtype=torch.float32)
    expected = case.residual + case.residual @ case.weight.T
    linear_residual(case.residual, case.residual, case.weight, None)
    torch.testing.assert_close(case.residual, expected)


def test_a_stream_may_be_part_of_a_wider_tensor():
    case = make_stream_case(5, 24, 12, 8, dtype=torch.float32)
    wide = torch.cat((case.residual, case.residual), dim=1)
    output = linear_residual_norm_linear(
        wide[:, :24],
        case.x,
        case.weight,
        None,
        case.norm_weight,
        EPS,
        case.next_weight,
        None,
        False,
    )
    expected, total = case.unfused("linear_residual_norm_linear")
    assert torch.equal(output, expected)
    assert torch.equal(wide[:, :24], total)
    assert torch.equal(wide[:, 24:], case.residual)
