"""How far two tensors are apart."""

import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE
from services.engine.compilation.graphs.verdict import RELATIVE_TOLERANCE
from services.engine.replay.compare import deviation, first_difference


def compare(expected, actual, dtype=torch.float32):
    tensors = (torch.tensor(values, dtype=dtype) for values in (expected, actual))
    return deviation("x", *tensors, dtype)


def test_equal_tensors_are_exact():
    found = compare([1.0, -torch.inf, 0.0], [1.0, -torch.inf, 0.0])
    assert (found.is_exact, found.is_excessive, found.error) == (True, False, 0)


def test_the_error_is_relative_to_the_largest_element():
    found = compare([100.0, 1.0, -torch.inf], [100.0, 2.0, -torch.inf])
    assert found.error == pytest.approx(0.01)


@pytest.mark.parametrize("dtype", RELATIVE_TOLERANCE)
def test_only_more_than_the_dtypes_tolerance_is_excessive(dtype):
    assert not compare([8.0, 4.0], [8.0, 4.0 + 4 * RELATIVE_TOLERANCE[dtype]], dtype).is_excessive
    assert compare([8.0, 4.0], [8.0, 4.0 + 32 * RELATIVE_TOLERANCE[dtype]], dtype).is_excessive


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_is_excessive(value):
    found = compare([1.0, 2.0], [1.0, value])
    assert found.is_excessive
    assert not found.is_exact


def test_8_bit_floats_may_be_off_by_a_step():
    one, step, two_steps = (torch.tensor([448.0, x]).to(FP8_CACHE_DTYPE) for x in (416, 448, 320))
    assert deviation("k", one, one, torch.float32).is_exact
    assert not deviation("k", one, step, torch.float32).is_excessive
    assert deviation("k", one, two_steps, torch.float32).is_excessive


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)], ids=str)
def test_the_first_row_that_differs_is_found_in_tensors_of_any_shape(shape):
    expected = torch.zeros(shape)
    actual = expected.clone()
    actual[2:] = torch.nan
    assert first_difference(expected, actual) == 2


def test_zeros_have_a_scale_too():
    assert compare([0.0], [1e-3]).is_excessive
