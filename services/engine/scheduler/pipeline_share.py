"""Shares running requests among the steps in flight, of which each pipeline stage runs one.

A request is scheduled again only after its result is back: only the last stage has the token.
"""

from collections.abc import Sequence

from services.engine.request import Request


class PipelineShare:
    """Chooses the running requests of one step, so that each stage has decodes to run."""

    def __init__(self, running: Sequence[Request], num_stages: int) -> None:
        """Gives the step an equal share of the decodes.

        Args:
            running: the running requests.
            num_stages: pipeline stages, hence steps in flight.
        """
        num_decodes = sum(
            request.num_computed_tokens >= request.num_prompt_tokens for request in running
        )
        self._num_decodes_left = -(-num_decodes // num_stages)

    def take(self, request: Request) -> bool:
        """Returns whether a running request is for this step; a decode then uses up its place."""
        if request.num_pending_tokens:
            return False  # its next position, or its next token, is unknown
        if request.num_computed_tokens < request.num_prompt_tokens:
            return True
        if request.awaits_mask or not self._num_decodes_left:
            return False
        self._num_decodes_left -= 1
        return True
