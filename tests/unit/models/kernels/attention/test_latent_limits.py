"""Steps that latent attention's grid does not hold."""

import pytest

from models.kernels.attention.latent.latent_attention import MOST_TOKENS, latent_attention
from tests.support.latent_case import make_latent_case


def test_a_step_of_too_many_tokens_is_refused_before_its_launch():
    case = make_latent_case([1], [9], num_heads=1, latent_dim=16, rope_dim=16)
    q = case.cache.latent.new_empty(MOST_TOKENS + 1, 1, 32)
    output = q.new_empty(MOST_TOKENS + 1, 1, 16)
    with pytest.raises(ValueError, match="steps of 65536 tokens; the limit is 65535"):
        latent_attention(q, case.cache, case.metadata, output, 1.0)
