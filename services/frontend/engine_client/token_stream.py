"""One request's tokens as they come from the engine."""

import asyncio
from collections.abc import Callable, Sequence

from protos.engine.v1.engine_pb2 import Finished
from services.frontend.engine_client.messages import (
    PositionLogprobs,
    TokenBatch,
    error_of,
)


class TokenStream:
    """The reader's and the session's end of one live request.

    Tokens that nobody has read yet wait here and are read in one batch, so a slow reader costs
    fewer, larger messages and holds up nobody. The request's own length bounds what can wait.
    """

    def __init__(self, handle: int, abort: Callable[[int], None]) -> None:
        self.handle = handle
        self._abort = abort
        self._pending = TokenBatch()
        self._error: Exception | None = None
        self._is_admitted = False
        self._is_over = False
        self._news = asyncio.Event()

    async def admitted(self) -> None:
        """Waits until the engine has taken the request.

        Raises:
            FrontendError, EngineFaultError: it has not.
        """
        while not (self._is_admitted or self._is_over):
            await self._wait()
        if self._error is not None:
            raise self._error

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all there are. After the last batch there is nothing to read.

        Raises:
            FrontendError, EngineFaultError: the request failed; raised once its tokens are read.
        """
        while not (self._pending.token_ids or self._is_over):
            await self._wait()
        batch, self._pending = self._pending, TokenBatch()
        if self._error is not None and not batch.token_ids:
            raise self._error
        return batch

    def abort(self) -> None:
        """Ends the request early, unless it is over; the engine still says what it cost."""
        if not self._is_over:
            self._abort(self.handle)

    def put_admitted(self) -> None:
        """Takes the news that the engine has taken the request."""
        self._is_admitted = True
        self._news.set()

    def put(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """Takes new tokens."""
        self._is_admitted = True
        self._pending.token_ids += token_ids
        self._pending.logprobs += logprobs
        self._news.set()

    def put_prompt_logprobs(self, logprobs: Sequence[PositionLogprobs]) -> None:
        """Takes log-probabilities of the prompt, which wait for the first token."""
        self._pending.prompt_logprobs += logprobs

    def put_finished(self, finished: Finished) -> None:
        """Takes the request's end."""
        if finished.HasField("failure"):
            self.put_error(error_of(finished.failure))
            return
        self._pending.finish_reason = finished.finish_reason
        self._pending.usage = finished.usage
        if finished.HasField("stop_token_id"):
            self._pending.stop_token_id = finished.stop_token_id
        self._is_over = True
        self._news.set()

    def put_error(self, error: Exception) -> None:
        """Takes the request's failure."""
        self._error = error
        self._is_over = True
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
