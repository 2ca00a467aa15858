"""Embeddings of each token for each layer.

Source: transformers 5.23, models/gemma4.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from models.config import ModelConfig
from models.layers.decoder import Decoder
from models.layers.embedding import VocabParallelEmbedding
from models.layers.linear import MergedColumnParallelLinear
from models.layers.norm import RMSNorm
from models.parallel.group import SINGLE, ParallelGroup


class TokenInputDecoder(Decoder):
    """A decoder whose layers may each get a small vector of every token.

    It is half of a table's entry and half a projection of the token's vector.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], group: ParallelGroup
    ) -> None:
        super().__init__(config, layers, group)
        sizes = config.gemma4
        self._size = sizes.token_size if sizes else 0
        if sizes is None or not self._size:
            return
        self._pad_token_id, self._vision = sizes.pad_token_id, config.vision
        if group.stage.size > 1:
            raise ValueError(
                "embeddings for each layer need token ids, which later pipeline stages do not get"
            )
        columns = len(layers) * self._size
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            sizes.token_vocab_size, columns, group=group
        )
        # Every rank computes all of it, as a group of one.
        self.per_layer_model_projection = MergedColumnParallelLinear(
            config.hidden_size, [columns], bias=False, group=SINGLE
        )
        self.per_layer_projection_norm = RMSNorm(self._size, config.rms_norm_eps)
        # Rounded as transformers rounds it.
        self._table_scale = torch.tensor(self._size**0.5, device="cpu").item()
        self._projection_scale = config.hidden_size**-0.5

    @property
    def own_layers(self) -> list[nn.Module]:
        """No layers if they get vectors: each reads its own part, so all are traced."""
        return [] if self._size else super().own_layers

    def token_inputs(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Returns the vectors of T tokens for all layers, [T, layers, n], or None."""
        if not self._size:
            return None
        if self._vision is not None:
            # Tokens of images have the table's entry of padding.
            is_image = token_ids == self._vision.image_token_id
            token_ids = token_ids.masked_fill(is_image, self._pad_token_id)
        shape = (token_ids.shape[0], -1, self._size)
        projected = self.per_layer_model_projection(embedded) * self._projection_scale
        projected = self.per_layer_projection_norm(projected.view(shape))
        stored = self.embed_tokens_per_layer(token_ids).view(shape) * self._table_scale
        inputs: torch.Tensor = (projected + stored) * 2.0**-0.5
        return inputs


class TokenInputGate(nn.Module):
    """Gates a token's vector for a layer by the hidden state, and projects it to one."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        # Every rank computes all of it, as a group of one.
        self.gate = MergedColumnParallelLinear(hidden, [size], bias=False, group=SINGLE)
        self.projection = MergedColumnParallelLinear(size, [hidden], bias=False, group=SINGLE)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, token_input: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] and [T, n] to what is added to the residual stream, [T, hidden]."""
        gated = functional.gelu(self.gate(hidden), approximate="tanh") * token_input
        output: torch.Tensor = self.norm(self.projection(gated))
        return output
