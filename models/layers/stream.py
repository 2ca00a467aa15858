"""The residual stream, and the layers that add to it."""

from collections.abc import Callable

import torch
from torch import nn

from models.layers.norm import RMSNorm

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream as its last addend and the rest, each [T, hidden].

The sum is left to the next norm, which fuses it. None: it is done, and the first is the stream.
"""


class StreamLayer(nn.Module):
    """A sub-layer that fuses what stands around it: the norm before it and the sum after it."""

    forward_stream: Callable[..., Stream]
    """(stream, norm, ...): adds to the stream what the layer makes of the normalised stream."""


def pass_through(sublayer: nn.Module, stream: Stream, norm: RMSNorm, *inputs: object) -> Stream:
    """Adds to the stream what a sub-layer makes of the normalised stream and `inputs`.

    A sub-layer that is no StreamLayer maps [T, hidden] to [T, hidden].
    """
    if isinstance(sublayer, StreamLayer):
        return sublayer.forward_stream(stream, norm, *inputs)
    normed, total = norm.add(*stream)
    return sublayer(normed, *inputs), total
