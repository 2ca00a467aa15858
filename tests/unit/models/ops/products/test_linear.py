"""The reference of products, with norms and gates, in every dtype and at odd shapes."""

import pytest
import torch

from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from tests.support.linear_case import OPTIONS, make_linear_case
from tests.support.tolerances import ROW_TOLERANCE, assert_rows_close


@pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [(1, 12, 40), (3, 7, 100), (17, 33, 64)], ids=str)
def test_products_are_those_of_plain_arithmetic(size, options, dtype):
    case = make_linear_case(*size, **options, dtype=dtype)
    assert_rows_close(case.run(), case.exact())


def test_the_parts_of_a_product_are_summed_before_the_norm():
    parts, residual = torch.randn(3, 7, 36), torch.randn(7, 36)
    weight = torch.randn(36)
    total = parts.sum(0) + residual
    normed = add_rms_norm(parts, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    assert torch.equal(normed, rms_norm(residual, weight, 1e-6))
