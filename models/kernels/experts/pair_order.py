"""The order in which the pairs of a token and an expert are computed."""

from dataclasses import dataclass

import torch

from models.kernels.experts.expert_forms import are_few
from models.kernels.experts.moe_routing import sort_by_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """Pairs sorted by expert, or each alone in the order of tokens.

    pairs, starts: of moe_routing.sort_by_expert; if pairs are alone, both are the expert of each.
    num_experts: experts that are here. num_choices: experts that tokens choose from. top_k: pairs
    of a token.
    """

    pairs: torch.Tensor
    starts: torch.Tensor
    num_experts: int
    num_choices: int
    top_k: int
    is_alone: bool

    @classmethod
    def of(cls, ids: torch.Tensor, num_experts: int, num_choices: int) -> "PairOrder":
        """Returns the order for experts of tokens, [T, top_k] int32; few pairs are alone."""
        is_alone = are_few(ids.numel(), num_choices, ids.shape[1])
        pairs, starts = (ids, ids) if is_alone else sort_by_expert(ids, num_experts, num_choices)
        return cls(
            pairs=pairs,
            starts=starts,
            num_experts=num_experts,
            num_choices=num_choices,
            top_k=ids.shape[1],
            is_alone=is_alone,
        )

    @property
    def num_pairs(self) -> int:
        """T * top_k."""
        return self.pairs.numel()

    def num_tiles(self, rows: int) -> int:
        """Returns the tiles of `rows` rows, each of one expert, in the worst case."""
        return self.num_pairs if self.is_alone else self.num_pairs // rows + self.num_experts

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of tokens' values, [T, N], for each pair in this order, [T * top_k, N].

        Products read the order before they wait for kernels that begin early, such as the router's.
        So one that does not must come between: this copy, also where each token has one pair.
        """
        if self.is_alone:
            return values.repeat_interleave(self.top_k, 0)
        return values[self._rows // self.top_k]

    def sorted(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of pairs, [T * top_k, N] in the order of tokens, in this order."""
        return values if self.is_alone else values[self._rows]

    @property
    def _rows(self) -> torch.Tensor:
        # Past the last pair of an expert that is here they have no values.
        return self.pairs.clamp(0, self.num_pairs - 1)
