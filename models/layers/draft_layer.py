"""Draft layers: decoder layers that guess the token after next, and their norms and heads.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.decoder import DecoderLayer
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.linear import MergedColumnParallelLinear
from models.layers.norm import RMSNorm
from models.parallel.group import SINGLE, ParallelGroup


class SharedHead(nn.Module):
    """Maps a draft layer's output to logits.

    head: None if it is the model's.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        self.norm: nn.Module = draft_norm(config)
        self.head: ParallelLMHead | None = ParallelLMHead(
            config.vocab_size, config.hidden_size, group=group
        )


class DraftInputs(nn.Module, ABC):
    """Parts of a draft layer besides attention, feed-forward and their norms.

    A subclass has these, too: a checkpoint has all under one layer number, past the last layer's.

    embed_tokens: None if it is the model's.
    """

    embed_tokens: VocabParallelEmbedding | None
    shared_head: SharedHead

    reads_last_layer: ClassVar[bool] = False
    """Whether `join` reads the output of the model's last layer, which follows its hidden state."""

    def add_inputs(self, config: ModelConfig, group: ParallelGroup) -> None:
        """Adds the parts of this class, without weights."""
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=group
        )
        self.enorm = draft_norm(config)
        self.hnorm = draft_norm(config)
        self.shared_head = SharedHead(config, group)

    @abstractmethod
    def join(self, embedded: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Makes the layer's input of T embeddings [T, hidden] and previous outputs [T, n]."""

    def finished(self, states: torch.Tensor) -> torch.Tensor:
        """Maps the decoder layer's output, [T, m], to outputs like the model's, [T, n]."""
        normed: torch.Tensor = self.shared_head.norm(states)
        return torch.cat((normed, states), dim=-1) if self.reads_last_layer else normed


class DraftLayer(DecoderLayer, DraftInputs):
    """A decoder layer with the projection that makes its input."""

    def __init__(
        self, config: ModelConfig, parts: tuple[nn.Module, nn.Module], group: ParallelGroup
    ) -> None:
        """Takes the configuration, attention and feed-forward part, and the ranks."""
        super().__init__(config, *parts)
        self.add_inputs(config, group)
        hidden = config.hidden_size
        # Every rank computes all of it, as a group of one.
        self.eh_proj = MergedColumnParallelLinear(2 * hidden, [hidden], bias=False, group=SINGLE)

    def join(self, embedded: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Projects T embeddings [T, hidden] and previous outputs [T, n], both normalised."""
        if self.reads_last_layer:
            outputs = outputs[:, embedded.shape[-1] :]
        joined: torch.Tensor = self.eh_proj(
            torch.cat((self.enorm(embedded), self.hnorm(outputs)), dim=-1)
        )
        return joined


class LastLayerDraft(DraftLayer):
    """A draft layer that joins the last layer's output before the model's norm.

    Source: SGLang, models/mimo_v2_flash_nextn.py, whose worker passes states before the norm.
    """

    reads_last_layer: ClassVar[bool] = True


def draft_norm(config: ModelConfig) -> RMSNorm:
    """Returns a norm of hidden states, as the model's."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, offset=config.norm_offset)
