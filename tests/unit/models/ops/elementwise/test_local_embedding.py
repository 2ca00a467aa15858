"""The embedding of the tokens that one of several ranks holds."""

import pytest
import torch
from torch.nn import functional

from models.ops.elementwise.local_embedding import local_embedding

VOCABULARY, HIDDEN = 23, 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 127])
def test_the_vectors_of_all_ranks_add_up_to_the_embedding(num_tokens, ids, dtype):
    weight = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    token_ids = torch.randint(VOCABULARY, (num_tokens,), dtype=ids)
    firsts = (0, 8, 16)
    vectors = torch.stack(
        [local_embedding(token_ids, weight[first : first + 8], first) for first in firsts]
    )
    assert torch.equal(vectors.sum(0), functional.embedding(token_ids, weight))
    assert ((vectors != 0).any(-1).sum(0) <= 1).all()


def test_tokens_of_no_rank_get_zeros():
    token_ids = torch.tensor([-1, -(2**30), VOCABULARY, 2**30])
    assert not local_embedding(token_ids, torch.randn(VOCABULARY, HIDDEN), 0).any()
