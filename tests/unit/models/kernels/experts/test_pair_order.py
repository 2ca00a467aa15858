"""The order of pairs of a token and an expert."""

import pytest
import torch

from models.kernels.experts.pair_order import PairOrder


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_of_tokens_are_a_copy_that_comes_after_the_router(top_k):
    """A product reads the order before it waits, so an ordinary kernel must come before it."""
    ids = torch.zeros(3, top_k, dtype=torch.int32)
    hidden = torch.arange(6.0).view(3, 2)
    order = PairOrder.of(ids, 16, 16)
    assert order.is_alone
    rows = order.of_tokens(hidden)
    assert torch.equal(rows, hidden[torch.arange(3 * top_k) // top_k])
    assert rows.data_ptr() != hidden.data_ptr()
