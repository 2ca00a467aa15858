"""The queries of an indexer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexQueries:
    """Queries of T tokens, for an index with J heads of size D.

    q: [T, J, D].
    weights: [T, J] float32, scaling included.
    top_k: most tokens to choose.
    """

    q: torch.Tensor
    weights: torch.Tensor
    top_k: int

    def of(self, tokens: slice) -> "IndexQueries":
        """Returns the queries of some tokens."""
        return IndexQueries(q=self.q[tokens], weights=self.weights[tokens], top_k=self.top_k)

    def alone(self, tokens: slice) -> "IndexQueries":
        """Returns the same in memory of their own."""
        own = self.of(tokens)
        return IndexQueries(q=own.q.clone(), weights=own.weights.clone(), top_k=self.top_k)
