"""Attention within segments, whatever their lengths are."""

import pytest
import torch

from models.ops.attention.segment_attention import segment_attention
from tests.support.segments import bounds_of, reference


@pytest.mark.parametrize("lengths", [[1], [9], [5, 7, 1], [4, 4, 4], [3, 64, 3, 64]], ids=str)
def test_rows_see_their_segment_and_no_other(lengths):
    torch.manual_seed(0)
    heads = torch.randn(sum(lengths), 6, 10)
    q, k, v = heads[:, :2], heads[:, 2:4], heads[:, 4:]
    bounds = bounds_of(lengths)
    actual = segment_attention(q, k, v, bounds, 0.3)
    assert actual.shape == (sum(lengths), 20)
    torch.testing.assert_close(actual, reference(q, k, v, bounds, 0.3))
    others = torch.randn_like(heads)
    others[: lengths[0]] = heads[: lengths[0]]
    changed = segment_attention(others[:, :2], others[:, 2:4], others[:, 4:], bounds, 0.3)
    assert torch.equal(changed[: lengths[0]], actual[: lengths[0]])


def test_the_schema_and_the_fake_agree_with_the_operator():
    heads = torch.randn(8, 3, 4)
    arguments = (heads, heads, heads, bounds_of([5, 3]), 0.5)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.octavo.segment_attention.default, arguments, test_utils=tests)
