"""What an indexer asks for."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexQueries:
    """Of T tokens, J heads of size D of the index.

    q: [T, J, D]. weights: [T, J] float32, scaling included. top_k: tokens to choose at most.
    """

    q: torch.Tensor
    weights: torch.Tensor
    top_k: int

    def of(self, tokens: slice) -> "IndexQueries":
        """Returns those of some tokens."""
        return IndexQueries(q=self.q[tokens], weights=self.weights[tokens], top_k=self.top_k)
