"""The residual stream, and the layers that add to it."""

from collections.abc import Callable

import torch
from torch import nn

from models.layers.norm import RMSNorm

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream as its last addend and the rest, each [T, hidden].

The next norm fuses their sum. None: the first is the whole stream.
"""


class StreamLayer(nn.Module):
    """A sub-layer that fuses its neighbours: the norm before it and the sum after it."""

    forward_stream: Callable[..., Stream]
    """(stream, norm, ...): adds the layer's output for the normalised stream to the stream."""


def pass_through(sublayer: nn.Module, stream: Stream, norm: RMSNorm, *inputs: object) -> Stream:
    """Adds a sub-layer's output for the normalised stream and `inputs` to the stream.

    Any other sub-layer than a StreamLayer maps [T, hidden] to [T, hidden].
    """
    if isinstance(sublayer, StreamLayer):
        return sublayer.forward_stream(stream, norm, *inputs)
    normed, total = norm.add(*stream)
    return sublayer(normed, *inputs), total
