import pytest
import torch

from models.ops.sampling.mask_tokens import mask_tokens
from tests.support.token_masks import pack_bits


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 33, 127, 1024])
def test_only_tokens_whose_bit_is_set_keep_their_logit(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size, generator=generator)
    is_allowed = torch.rand(2, vocab_size, generator=generator) < 0.5
    masked = logits.clone()
    mask_tokens(masked, torch.tensor([3, 1], dtype=torch.int32), pack_bits(is_allowed))
    expected = logits.clone()
    expected[3, ~is_allowed[0]] = -torch.inf
    expected[1, ~is_allowed[1]] = -torch.inf
    assert torch.equal(masked, expected)
