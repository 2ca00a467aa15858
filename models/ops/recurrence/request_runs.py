"""Splits a step's tokens for references that compute states: PyTorch on a CPU."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionMetadata
from models.state_cache import StateCacheData, pages_after

CHUNK = 64
"""Tokens of a chunk; chunks end at multiples of it in the request, however a step cuts them."""
MAX_STEPS = 16
"""Query tokens up to which states are computed a token at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRun:
    """Requests of a step with equally many query tokens, G with n each.

    pages: [G, slots * P], of their states. tokens: [G, n], their tokens' indices in the step.
    starts: each request's position of its first query token; 0 starts without a state.
    """

    pages: torch.Tensor
    tokens: torch.Tensor
    starts: tuple[int, ...]

    @property
    def is_first(self) -> torch.Tensor:
        """Whether each request starts without a state: [G] bool."""
        return torch.tensor([start == 0 for start in self.starts], device=self.tokens.device)

    def pages_after(self, cache: StateCacheData, num_tokens: int) -> torch.Tensor:
        """Returns the pages of the states after as many of the run's tokens: [G, P]."""
        positions = torch.tensor(self.starts, device=self.pages.device) + num_tokens
        return pages_after(cache, self.pages, positions)

    def kept(self, cache: StateCacheData) -> range:
        """Returns how many of the run's tokens come before each state that is kept."""
        num_tokens = self.tokens.shape[1]
        return range(1 if num_tokens <= cache.num_slots else num_tokens, num_tokens + 1)

    @property
    def computes_steps(self) -> bool:
        """Whether tokens are computed one after another, not in chunks."""
        return self.tokens.shape[1] <= MAX_STEPS

    def chunks(self) -> Iterator[slice]:
        """Yields the tokens of each chunk, of the only request of a run with chunks."""
        (start,), end = self.starts, self.starts[0] + self.tokens.shape[1]
        first = start
        while first < end:
            last = min(end, (first // CHUNK + 1) * CHUNK)
            yield slice(first - start, last - start)
            first = last


def request_runs(metadata: AttentionMetadata) -> list[RequestRun]:
    """Returns a step's requests in runs: short ones of a length together, each longer one alone.

    In batch-invariant mode each token is a run of its own, after those before it: its state then
    has the same bits however a prompt is cut. Requests without query tokens are left out.
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request in range(len(lengths)):
        num_queries = starts[request + 1] - starts[request]
        is_alone = is_batch_invariant() or num_queries > MAX_STEPS
        if num_queries:
            members[num_queries, request if is_alone else -1].append(request)
    runs = []
    for (num_queries, _), requests in members.items():
        size = 1 if is_batch_invariant() else num_queries
        for first in range(0, num_queries, size):
            tokens = [[starts[each] + first + i for i in range(size)] for each in requests]
            # A dummy request has no tokens, and so no state.
            positions = tuple(max(0, lengths[each] - num_queries) + first for each in requests)
            runs.append(_run(metadata, requests, tokens, positions))
    return runs


def _run(
    metadata: AttentionMetadata,
    requests: list[int],
    tokens: list[list[int]],
    starts: tuple[int, ...],
) -> RequestRun:
    device = metadata.block_tables.device
    return RequestRun(
        pages=metadata.block_tables[torch.tensor(requests, device=device)],
        tokens=torch.tensor(tokens, device=device),
        starts=starts,
    )
