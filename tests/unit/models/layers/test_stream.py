"""Sub-layers that fuse their norm and their sum, and others, in one residual stream."""

import pytest
import torch
from torch import nn

from models.layers.linear import RowParallelLinear
from models.layers.norm import RMSNorm
from models.layers.stream import StreamLayer, pass_through
from models.parallel.group import SINGLE


class Doubling(nn.Module):
    """A sub-layer that knows no stream."""

    def forward(self, hidden, factor=2):
        return hidden * factor


class FusedDoubling(StreamLayer):
    """The same, adding to the stream by itself."""

    def forward_stream(self, stream, norm, factor=2):
        normed, total = norm.add(*stream)
        return total + normed * factor, None


@pytest.fixture
def norm():
    norm = RMSNorm(8, 1e-6)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("sublayer", [Doubling(), FusedDoubling()], ids=["plain", "fused"])
@pytest.mark.parametrize("is_summed", [True, False])
def test_a_sublayers_output_joins_the_stream(sublayer, is_summed, norm):
    hidden, residual = torch.randn(2, 3, 8)
    total = hidden + residual
    stream = (total, None) if is_summed else (hidden, residual)
    addend, rest = pass_through(sublayer, stream, norm, 3)
    joined = addend if rest is None else addend + rest
    torch.testing.assert_close(joined, total + norm(total) * 3)


def test_a_row_parallel_layer_adds_its_projection_to_the_stream():
    layer = RowParallelLinear(4, 8, bias=True, group=SINGLE)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    total, x = torch.randn(3, 8), torch.randn(3, 4)
    addend, rest = layer.add_to(total, x)
    joined = addend if rest is None else addend + rest
    torch.testing.assert_close(joined, total + layer(x))
