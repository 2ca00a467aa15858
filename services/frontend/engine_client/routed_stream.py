"""One request's tokens, whichever engines make them."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import EngineRequest, TokenBatch, pack_uint32
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    FrontendError,
    InvalidRequestError,
    OverloadedError,
)

log = structlog.get_logger()

Tried = set[EngineClient]


@dataclass(slots=True)
class RoutingCounts:
    """What became of requests that one engine did not serve alone."""

    num_retries: int = 0
    """Times that a request without tokens was sent to another engine."""
    num_migrations: int = 0
    """Times that a request went on with another engine behind its tokens so far."""


class RoutedStream:
    """A request's output. Where its engine refuses it or is lost, another one goes on.

    The next engine gets the prompt with all tokens that came so far, and says nothing of those
    again; sampling is a function of the seed and the position, so it chooses what the first one
    would have chosen. Each engine is tried once until there is another token; a request that ends
    its engines therefore ends `max_attempts` of them at most.
    """

    def __init__(
        self,
        request: EngineRequest,
        send: Callable[[EngineRequest, Tried], tuple[EngineClient, TokenStream]],
        *,
        max_attempts: int,
        counts: RoutingCounts,
    ) -> None:
        """Sends the request.

        Args:
            request: what to run; its sampling has a seed.
            send: sends it to an engine outside a set of them, or raises EngineUnavailableError.
            max_attempts: engines tried for one token.
            counts: told of retries and migrations.

        Raises:
            EngineUnavailableError: no engine takes requests now.
            InvalidRequestError: the request is too large to send.
            DeadlineExpiredError: its time is over.
        """
        self._request = request
        self._send = send
        self._max_attempts = max_attempts
        self._counts = counts
        self._tokens = array("I")
        self._tried: Tried = set()
        self._is_aborted = False
        self._engine, self._stream = send(request, self._tried)

    async def admitted(self) -> None:
        """Waits until an engine has taken the request.

        Raises:
            FrontendError, EngineFaultError: none has.
        """
        while True:
            try:
                return await self._stream.admitted()
            except FrontendError as error:
                self._go_on_elsewhere(error)

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all there are. After the last batch there is nothing to read.

        Raises:
            FrontendError, EngineFaultError: the request failed, and no engine goes on with it.
        """
        while True:
            try:
                batch = await self._stream.read()
            except FrontendError as error:
                self._go_on_elsewhere(error)
                continue
            if batch.token_ids:
                self._tokens.extend(batch.token_ids)
                self._tried.clear()
            return batch

    def abort(self) -> None:
        """Ends the request early, unless it is over; the engine still says what it cost."""
        self._is_aborted = True
        self._stream.abort()

    def _go_on_elsewhere(self, error: FrontendError) -> None:
        """Sends the request, as far as it is, to an engine that was not tried yet.

        Raises:
            FrontendError: `error`, where that makes no sense or no engine is left.
        """
        if not isinstance(error, EngineUnavailableError | OverloadedError):
            raise self._refusal(error)
        self._tried.add(self._engine)
        if self._is_aborted or len(self._tried) >= self._max_attempts:
            raise error
        request = replace(
            self._request,
            prompt_token_ids=self._request.prompt_token_ids + pack_uint32(self._tokens),
            num_resumed_tokens=len(self._tokens),
        )
        lost = self._engine
        try:
            self._engine, self._stream = self._send(request, self._tried)
        except EngineUnavailableError:
            raise error from None  # what the engine said tells more than that there is no other
        except InvalidRequestError as refusal:
            raise self._refusal(refusal) from None
        if self._tokens:
            self._counts.num_migrations += 1
        else:
            self._counts.num_retries += 1
        log.info(
            "request_rerouted",
            request_id=request.request_id,
            reason=str(error),
            engine=lost.address.target,
            next_engine=self._engine.address.target,
            output_tokens=len(self._tokens),
        )

    def _refusal(self, error: FrontendError) -> FrontendError:
        """Returns the error for the caller, who has no part in how a request goes on."""
        if (
            self._tried
            and self._tokens
            and isinstance(error, InvalidRequestError | DuplicateRequestError)
        ):
            return EngineUnavailableError(
                f"the engine was lost after {len(self._tokens)} tokens, and another cannot go on:"
                f" {error}"
            )
        return error
