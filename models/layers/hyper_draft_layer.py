"""Draft layers between hyper-connections."""

from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.draft_layer import DraftInputs
from models.layers.hyper_connection import HyperLayer, StreamNorm, hyper_config
from models.layers.linear import MergedColumnParallelLinear
from models.parallel.group import SINGLE, ParallelGroup


class HyperDraftLayer(HyperLayer, DraftInputs):
    """A hyper layer that joins a token's vector with each residual stream of the last layer.

    It has a head of its own that collapses its streams.

    Source: MTPBlock in inference/model.py of the released DeepSeek-V4-Flash.
    """

    reads_last_layer: ClassVar[bool] = True

    def __init__(
        self, config: ModelConfig, parts: tuple[nn.Module, nn.Module], group: ParallelGroup
    ) -> None:
        """Takes the configuration, attention and feed-forward part, and the ranks."""
        super().__init__(config, *parts, is_first=False)
        self.add_inputs(config, group)
        self.shared_head.norm = StreamNorm(config)
        self._num_streams = hyper_config(config).num_streams
        hidden = config.hidden_size
        # Every rank computes all of both, as a group of one.
        self.e_proj, self.h_proj = (
            MergedColumnParallelLinear(hidden, [hidden], bias=False, group=SINGLE) for _ in range(2)
        )

    def join(self, embedded: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Maps T embeddings [T, hidden] and outputs, states before streams, to [T, S * hidden]."""
        size = embedded.shape[-1]
        streams = outputs[:, size:].reshape(-1, size)
        projected = self.h_proj(self.hnorm(streams)).view(len(embedded), self._num_streams, size)
        joined: torch.Tensor = self.e_proj(self.enorm(embedded)).unsqueeze(1) + projected
        return joined.flatten(1)
