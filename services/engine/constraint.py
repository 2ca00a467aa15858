"""The seam between a request and the rules that decide which tokens may come next."""

from collections.abc import Callable
from typing import Protocol

from services.engine.errors import EngineError


class Constraint(Protocol):
    """Decides on the host which tokens may come next."""

    @property
    def mask(self) -> bytes | None:
        """A bit for each token that may come next, in the form of grammar_masks of batch.proto.

        Rules that leave no token have no bits, which ends the request. None until it is computed,
        and after the end of the request.
        """

    @property
    def num_free_tokens(self) -> int:
        """How many tokens after the known ones may come without a mask."""

    def advance(self, token_id: int) -> None:
        """Takes the sampled token and starts to compute the next mask."""

    def listen(
        self, on_mask: Callable[[], None], on_end: Callable[[EngineError | None], None]
    ) -> None:
        """Calls `on_mask` for each new mask, and `on_end` once: with None or the error."""

    def close(self) -> None:
        """Frees its memory; may be called again."""
