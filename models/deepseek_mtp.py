"""Multi-token prediction: the layers after a model's last one, which guess tokens ahead.

A draft layer joins the model's output for a token with the token that followed it, and guesses the
next one. It shares the model's rotation, and its embedding and head unless the checkpoint has
others. GLM-4.5 has the same form.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.config import ModelConfig
from models.layers.decoder import CausalLM, Decoder, DecoderLayer
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.latent_attention import LatentAttention
from models.layers.linear import MergedColumnParallelLinear
from models.layers.moe import feed_forward
from models.layers.norm import RMSNorm
from models.layers.self_attention import SelfAttention
from models.parallel.group import SINGLE, ParallelGroup


class SharedHead(nn.Module):
    """Maps a draft layer's output to logits.

    head: None if it is the model's.
    """

    def __init__(self, config: ModelConfig, group: ParallelGroup) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head: ParallelLMHead | None = ParallelLMHead(
            config.vocab_size, config.hidden_size, group=group
        )


class DraftLayer(DecoderLayer):
    """A decoder layer with the projection that makes its input, named as in checkpoints.

    It is its own `mtp_block`: a checkpoint has attention, feed-forward, norms and the projection
    under one layer number, past the last layer's.

    embed_tokens: None if it is the model's.
    """

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        attention = _attention(config, layer_index, group)
        super().__init__(config, attention, feed_forward(config, layer_index, group))
        hidden = config.hidden_size
        self.embed_tokens: VocabParallelEmbedding | None = VocabParallelEmbedding(
            config.vocab_size, hidden, group=group
        )
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        # Every rank computes all of it, as a group of one.
        self.eh_proj = MergedColumnParallelLinear(2 * hidden, [hidden], bias=False, group=SINGLE)
        self.shared_head = SharedHead(config, group)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Makes the block's input of T embeddings and the previous outputs, all [T, hidden]."""
        joined: torch.Tensor = self.eh_proj(
            torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        )
        return joined


def _attention(config: ModelConfig, layer_index: int, group: ParallelGroup) -> nn.Module:
    """Returns the attention of a draft layer, which is that of the model's layers."""
    if config.mla is not None:
        return LatentAttention(config, layer_index, group)
    return SelfAttention(config, layer_index, group, has_head_norms=config.use_qk_norm)


@support_torch_compile(dynamic_arg_dims={"token_ids": 0, "positions": 0, "hidden": 0})
class DraftStep(nn.Module):
    """One guess for each token: a draft layer and what it shares with the model."""

    def __init__(self, decoder: Decoder, layer: DraftLayer) -> None:
        super().__init__()
        self.embed_tokens = layer.embed_tokens or decoder.embed_tokens
        self.rotary = decoder.rotary
        self.layer = layer

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Maps T token ids, their positions and hidden states [T, hidden] to [T, hidden]."""
        joined = self.layer.join(self.embed_tokens(token_ids), hidden)
        normed: torch.Tensor = self.layer.shared_head.norm(
            self.layer(joined, self.rotary(positions))
        )
        return normed


class DeepseekMTP:
    """The draft layers of a model that was loaded with them.

    They run inside `models.forward_context.forward_context`, like the model. The cache of draft
    layer i is number num_hidden_layers + i.
    """

    def __init__(self, model: CausalLM) -> None:
        """Takes the draft layers of a model.

        Raises:
            ValueError: it was loaded without.
        """
        decoder = model.model
        layers = list(decoder.layers)[model.config.num_hidden_layers :]
        if not layers:
            raise ValueError(f"{model.config.architecture} was loaded without draft layers")
        self.num_layers = len(layers)
        self.steps = [DraftStep(decoder, cast("DraftLayer", layer)) for layer in layers]
        self.run_steps: list[Callable[..., torch.Tensor]] = list(self.steps)
        """The code of each step; compilation replaces it."""
        self._model = model

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Does nothing: guessing for all tokens of a step writes their entries."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Computes one guess for each of T tokens.

        token_ids: [T], each token's successor at depth 0, and the one `depth` further otherwise.
        positions: [T] int64, of the token itself, whose slots the layer's cache entries take.
        hidden: [T, hidden], output of the model or the previous draft layer for the token.
        depth: number of previous draft layers; past the last layer, that one runs again.

        Returns [T, hidden], normalised: for `compute_logits` and for the next depth.
        """
        return self.run_steps[self._number(depth)](token_ids, positions, hidden)

    def compute_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] of a depth to the logits of the tokens it guesses, [S, vocab]."""
        head = self._head(depth)
        return head.gathered(head(hidden))

    def most_likely(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] of a depth to the most likely of the tokens it guesses, [S] int64."""
        head = self._head(depth)
        return head.most_likely(head(hidden))

    def _head(self, depth: int) -> ParallelLMHead:
        head = self.steps[self._number(depth)].layer.shared_head.head
        return self._model.lm_head if head is None else head

    def _number(self, depth: int) -> int:
        return min(depth, self.num_layers - 1)


def append_draft_layers(model: CausalLM, group: ParallelGroup) -> None:
    """Appends a model's draft layers to its layers, without weights.

    Raises:
        ConfigError: it has none that can be built.
    """
    config = model.config
    config.require_draft_layers()
    for number in range(config.num_draft_layers):
        model.model.layers.append(DraftLayer(config, config.num_hidden_layers + number, group))
