"""A small model of the same vocabulary that guesses what a larger one will say.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from collections.abc import Callable

import torch

from models.layers.decoder import CausalLM


class SmallModel:
    """Guesses with a language model of its own layers, embedding and head.

    It runs inside a `models.forward_context.forward_context` of its own caches.
    """

    num_layers = 0
    """Layers that guess from the model's hidden states."""
    keeps_position = False

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.run_steps: list[Callable[..., torch.Tensor]] = []

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Writes the cache entries of T tokens, [T] each."""
        self._model(token_ids, positions)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """Maps T tokens at their positions to hidden states, whatever `hidden` and `depth` are."""
        states: torch.Tensor = self._model(token_ids, positions)
        return states

    def compute_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to logits of the next tokens, [S, vocab]."""
        return self._model.compute_logits(hidden)

    def most_likely(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Maps [S, hidden] to the most likely of the next tokens, [S] int64."""
        del depth
        return self._model.lm_head.most_likely(self._model.local_logits(hidden)).clamp(min=0)
