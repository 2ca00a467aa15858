"""Chunks of decayed attention equal its steps."""

import pytest
import torch

from models.ops.recurrence.decayed_attention import decayed_chunk, decayed_step

HEADS, K, V = 3, 5, 7


@pytest.mark.parametrize("length", [1, 7, 64])
def test_a_chunk_is_as_many_steps(length):
    torch.manual_seed(length)
    q, k = torch.randn(2, HEADS, length, K, dtype=torch.float64)
    v = torch.randn(HEADS, length, V, dtype=torch.float64)
    inputs = q, k, v, -torch.rand(HEADS, length, 1, dtype=torch.float64)
    state = first = torch.randn(HEADS, K, V, dtype=torch.float64)
    outputs = []
    for token in range(length):
        state, output = decayed_step(state, *(x[:, token] for x in inputs))
        outputs.append(output)
    last, output = decayed_chunk(first, *inputs)
    torch.testing.assert_close(last, state, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output, torch.stack(outputs, dim=1), rtol=1e-12, atol=1e-12)
