"""Hyper-connections: several residual streams that each sub-layer reads, mixes and adds to.

Source: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections"; transformers 5.24,
models/deepseek_v4.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from models.config import ModelConfig
from models.config_sections.hyper_connections import HyperConfig
from models.layers.decoder import Decoder
from models.layers.norm import RMSNorm
from models.layers.rotary import Rotation
from models.layers.weight import Replicated, empty_parameter
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.products.linear import linear
from models.parallel.group import ParallelGroup


class StreamWeights(Replicated, nn.Module):
    """Weights of a token's S streams, from all of them; in float32, on every rank.

    fn: [W, S * hidden]. base: [W]. scale: [n], of the n parts of the W weights.
    """

    def __init__(self, config: ModelConfig, num_weights: int, num_parts: int) -> None:
        super().__init__()
        hyper = hyper_config(config)
        self.num_streams, self._eps = hyper.num_streams, config.rms_norm_eps
        size = hyper.num_streams * config.hidden_size
        self.fn = empty_parameter(num_weights, size, dtype=torch.float32)
        self.base = empty_parameter(num_weights, dtype=torch.float32)
        self.scale = empty_parameter(num_parts, dtype=torch.float32)

    def projected(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to weights without scale and base, [T, W] float32."""
        streams = streams.float()
        squares = streams.square().mean(-1, keepdim=True)
        return linear(streams * torch.rsqrt(squares + self._eps), self.fn, None)

    def summed(self, weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Returns the sum of streams, [T, S * hidden], with weights [T, S]: [T, hidden]."""
        collapsed = (weights.unsqueeze(-1) * self.split(streams)).sum(-2)
        return collapsed.to(streams.dtype)

    def split(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns streams, [T, S * hidden], one by one: [T, S, hidden]."""
        return streams.view(len(streams), self.num_streams, -1)


class KeptStreams(StreamWeights):
    """Collapses the streams to a sub-layer's input, and adds its output to each stream.

    Source: transformers 5.24, models/hy_v4, "independent hyper-connections".
    """

    def __init__(self, config: ModelConfig) -> None:
        self._hyper = hyper_config(config)
        super().__init__(config, 2 * self._hyper.num_streams, 2)

    def forward(
        self, streams: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to those with the output of a sub-layer added.

        sublayer: maps [T, hidden] to [T, hidden].
        """
        before, after = (
            (weights * scale + base).sigmoid()
            for weights, scale, base in zip(
                self.projected(streams).chunk(2, dim=-1),
                self.scale.unbind(0),
                self.base.chunk(2),
                strict=True,
            )
        )
        eps, dtype = self._hyper.eps, streams.dtype
        output = sublayer(self.summed(before + eps, streams)).float().unsqueeze(-2)
        after = (self._hyper.magnitude * after + eps).unsqueeze(-1)
        return (after * output + self.split(streams).float()).to(dtype).flatten(-2)


class MixedStreams(StreamWeights):
    """Collapses the streams to a sub-layer's input, and spreads its output over mixed streams."""

    def __init__(self, config: ModelConfig) -> None:
        hyper = hyper_config(config)
        super().__init__(config, (2 + hyper.num_streams) * hyper.num_streams, 3)
        self._hyper = hyper

    def forward(
        self, streams: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to those with the output of a sub-layer added.

        sublayer: maps [T, hidden] to [T, hidden].
        """
        before, after, mixing = self._weights(streams)
        output = sublayer(self.summed(before, streams))
        dtype = streams.dtype
        mixed = torch.matmul(mixing.to(dtype).transpose(-1, -2), self.split(streams))
        return (after.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed).flatten(-2)

    def _weights(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns weights of the streams before and after, [T, S], and of their mix, [T, S, S].

        The mixing matrix is made doubly stochastic, so that streams keep their size.
        """
        count, eps = self.num_streams, self._hyper.eps
        sizes = [count, count, count * count]
        before, after, mixing = (
            weights * scale + base
            for weights, scale, base in zip(
                torch.split(self.projected(streams), sizes, dim=-1),
                self.scale.unbind(0),
                torch.split(self.base, sizes),
                strict=True,
            )
        )
        mixing = mixing.view(-1, count, count).softmax(-1) + eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        for _ in range(self._hyper.num_iterations - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        return before.sigmoid() + eps, self._hyper.magnitude * after.sigmoid(), mixing


class StreamHead(StreamWeights):
    """Collapses the streams after the last layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, hyper_config(config).num_streams, 1)
        self._hc_eps = hyper_config(config).eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to [T, hidden]."""
        weights = (self.projected(streams) * self.scale + self.base).sigmoid() + self._hc_eps
        return self.summed(weights, streams)


class StreamNorm(RMSNorm):
    """Collapses the streams and normalises the sum: the last norm of a model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.rms_norm_eps)
        self.head = StreamHead(config)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to [T, hidden]."""
        return rms_norm(self.head(streams), self.weight, self.eps)


class HyperLayer(nn.Module):
    """Attention and feed-forward, each after a norm, between hyper-connections.

    self_attn maps ([T, hidden], Rotation) to [T, hidden]; mlp maps [T, hidden], with the ids of the
    tokens, [T], where the decoder passes them, to [T, hidden]. is_first: whether its input is the
    tokens' vectors, which become all streams.
    """

    def __init__(
        self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module, *, is_first: bool
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        connection = MixedStreams if hyper_config(config).num_iterations else KeptStreams
        self.attn_hc = connection(config)
        self.ffn_hc = connection(config)
        self._num_copies = hyper_config(config).num_streams if is_first else 1

    def forward(
        self, streams: torch.Tensor, rotation: Rotation, *token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Maps streams, [T, S * hidden], to the next layer's."""
        streams = streams.repeat(1, self._num_copies)
        streams = self.attn_hc(
            streams, lambda hidden: self.self_attn(self.input_layernorm(hidden), rotation)
        )
        output: torch.Tensor = self.ffn_hc(
            streams, lambda hidden: self.mlp(self.post_attention_layernorm(hidden), *token_ids)
        )
        return output


class HyperDecoder(Decoder):
    """A decoder of hyper layers."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], group: ParallelGroup
    ) -> None:
        super().__init__(config, layers, group)
        if group.stage.is_last:
            self.norm = StreamNorm(config)

    @property
    def own_layers(self) -> list[nn.Module]:
        """No layers: the first spreads tokens' vectors and others differ, so all are traced."""
        return []


def hyper_config(config: ModelConfig) -> HyperConfig:
    """Returns a config's hyper-connections.

    Raises:
        ValueError: it has none.
    """
    if config.hyper is None:
        raise ValueError(f"{config.architecture} needs hc_mult, and its config has none")
    return config.hyper
