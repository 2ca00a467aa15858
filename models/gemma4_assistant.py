"""Gemma 4's assistant: a few layers that attend to the model's own cache and guess its tokens.

Its input joins a token's embedding in the model with what the model, or the assistant itself, made
of the token before. All guesses of a step are made at the position of its newest token.
Source: transformers 5.24, models/gemma4_assistant.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from models.gemma4 import Gemma4ForCausalLM, Gemma4Layer
from models.gemma4_assistant_config import AssistantConfig
from models.kv_cache import CacheSpec
from models.layers.decoder import CausalLM
from models.layers.embedding import ParallelLMHead
from models.layers.linear import MergedColumnParallelLinear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.layers.weight import ExpertTensor
from models.parallel.group import SINGLE, ParallelGroup


class AssistantLayers(nn.Module):
    """The whole assistant, named as in checkpoints.

    token_ordering: [vocab] int64, tokens by group; without groups it is empty.
    """

    packed_modules_mapping: ClassVar = Gemma4ForCausalLM.packed_modules_mapping
    expert_tensors: ClassVar[Sequence[ExpertTensor]] = ()
    tied_weights: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: AssistantConfig, target_size: int, group: ParallelGroup) -> None:
        """Takes the config, the model's hidden size, and the ranks that share its caches."""
        super().__init__()
        layers, first = config.layers, config.first_layer
        self.config, self._top_centroids = layers, config.top_centroids
        size = layers.hidden_size
        numbers = range(first, layers.num_hidden_layers)
        self.layers = nn.ModuleList(Gemma4Layer(layers, number, group) for number in numbers)
        self._have_windows = [layers.sliding_window(number) is not None for number in numbers]
        self.norm = RMSNorm(size, layers.rms_norm_eps)
        self.lm_head = ParallelLMHead(layers.vocab_size, size, group=SINGLE)
        self.pre_projection = MergedColumnParallelLinear(
            2 * target_size, [size], bias=False, group=SINGLE
        )
        self.post_projection = MergedColumnParallelLinear(
            size, [target_size], bias=False, group=SINGLE
        )
        num_groups, num_positions = config.num_centroids, layers.max_position_embeddings + 1
        self.centroids: nn.Module | None = None
        if num_groups:
            self.centroids = MergedColumnParallelLinear(
                size, [num_groups], bias=False, group=SINGLE
            )
        self.token_ordering: torch.Tensor
        order = torch.arange(layers.vocab_size if num_groups else 0)
        self.register_buffer("token_ordering", order.view(max(1, num_groups), -1))
        self.rotary = RotaryEmbedding(layers.head_dim, num_positions, layers.rope)
        self.local_rotary = self.rotary
        if layers.local_rope is not None and layers.local_heads is not None:
            local = layers.local_heads.head_dim
            self.local_rotary = RotaryEmbedding(local, num_positions, layers.local_rope)

    @property
    def stored_module(self) -> nn.Module:
        """The module whose parameters have the names of a checkpoint."""
        return self

    def cache_specs(self) -> list[CacheSpec]:
        """Returns none: the caches are the model's."""
        return []

    def forward(self, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Maps T embeddings and states, [T, 2 * target_size], to states, [T, hidden].

        positions: [T], of the last keys that queries see; queries are at the next ones.
        """
        hidden: torch.Tensor = self.pre_projection(joined)
        rotation, local = self.rotary(positions + 1), self.local_rotary(positions + 1)
        for layer, has_window in zip(self.layers, self._have_windows, strict=True):
            hidden = layer(hidden, local if has_window else rotation)
        states: torch.Tensor = self.norm(hidden)
        return states

    def scored(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps [S, hidden] to logits, [S, n], and the tokens that they are of; None: all."""
        if self.centroids is None:
            return self.lm_head(states), None
        chosen = self.centroids(states).topk(self._top_centroids, dim=-1).indices
        token_ids = self.token_ordering[chosen].flatten(1)
        rows = self.lm_head.weight[token_ids]
        return torch.bmm(rows, states.unsqueeze(-1)).squeeze(-1), token_ids


class Gemma4Assistant:
    """Guesses with an assistant; `models.deepseek_mtp.DeepseekMTP` says how it is called."""

    num_layers = 0
    keeps_position = True

    def __init__(self, layers: AssistantLayers, model: CausalLM) -> None:
        self._layers, self._model = layers, model
        self.run_steps: list[Callable[..., torch.Tensor]] = []

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Does nothing: it has no cache."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Computes one guess for each of T tokens, [T, hidden].

        positions: [T], of the tokens before the newest ones, whatever `depth` is.
        hidden: at depth 0 the model's output for those; else what this made at the depth before.
        """
        if depth:
            hidden = self._layers.post_projection(hidden)
        embedded = self._model.model.embed_tokens(token_ids)
        embedded = embedded * self._model.config.multipliers.embedding
        states: torch.Tensor = self._layers(torch.cat((embedded, hidden), dim=-1), positions)
        return states

    def compute_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to logits, [S, vocab]; tokens that it does not score have -inf."""
        del depth
        logits, token_ids = self._layers.scored(hidden)
        if token_ids is None:
            return logits
        full = logits.new_full((len(logits), self._layers.config.vocab_size), float("-inf"))
        return full.scatter(1, token_ids, logits)

    def most_likely(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to the most likely of the tokens guessed, [S] int64."""
        del depth
        logits, token_ids = self._layers.scored(hidden)
        best = logits.argmax(dim=-1)
        if token_ids is None:
            return best
        return token_ids.gather(1, best.unsqueeze(1)).squeeze(1)
