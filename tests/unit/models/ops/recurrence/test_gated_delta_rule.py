"""Chunks of the gated delta rule equal its steps."""

import pytest
import torch

from models.ops.recurrence.gated_delta_rule import delta_chunk, delta_step

HEADS, K, V = 3, 5, 7


def random_inputs(length, *, decays_channels):
    q, k = torch.randn(2, HEADS, length, K, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(HEADS, length, V, dtype=torch.float64)
    decay = -torch.rand(HEADS, length, K if decays_channels else 1, dtype=torch.float64)
    beta = torch.rand(HEADS, length, 1, dtype=torch.float64)
    return q, k, v, decay, beta


@pytest.mark.parametrize("decays_channels", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_a_chunk_is_as_many_steps(length, decays_channels):
    torch.manual_seed(length)
    inputs = random_inputs(length, decays_channels=decays_channels)
    state = first = torch.randn(HEADS, K, V, dtype=torch.float64)
    outputs = []
    for token in range(length):
        state, output = delta_step(state, *(x[:, token] for x in inputs))
        outputs.append(output)
    last, output = delta_chunk(first, *inputs)
    torch.testing.assert_close(last, state, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output, torch.stack(outputs, dim=1), rtol=1e-12, atol=1e-12)


def test_strong_decays_stay_finite():
    torch.manual_seed(0)
    q, k, v, decay, beta = random_inputs(64, decays_channels=True)
    state, output = delta_chunk(torch.ones(HEADS, K, V).double(), q, k, v, 1000 * decay, beta)
    assert state.isfinite().all()
    assert output.isfinite().all()
