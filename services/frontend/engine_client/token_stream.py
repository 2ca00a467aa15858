"""One request's tokens, from any number of engines."""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from protos.engine.v1.engine_pb2 import Finished
from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import (
    ABORTED,
    LENGTH,
    TOKEN_BYTES,
    EngineRequest,
    ModelInfo,
    PositionLogprobs,
    TokenBatch,
    Usage,
    pack_uint32,
)
from services.frontend.engine_client.pool import EnginePool
from services.frontend.engine_client.route import Route, Visit
from services.frontend.engine_client.turns import Turn
from services.frontend.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)

log = structlog.get_logger()


class TokenStream:
    """The output of one request, continued by another engine if one refuses it or is lost.

    The next engine gets the prompt with all tokens so far. Sampling depends only on the seed and
    the position, so it samples what the lost engine would have. Each engine is tried once per
    token; at most `PoolLimits.max_attempts` engines can be lost for one token.

    Where models share a card, the request waits for its model's turn before it is sent, in
    `admitted` or `read`, and again if the engine fell asleep before the request came.

    Unread tokens are merged into one batch, so a slow reader gets fewer, larger messages.
    """

    def __init__(self, pool: EnginePool, request: EngineRequest, *, model: ModelInfo) -> None:
        """Sends the request, unless it has to wait for a turn.

        Raises:
            EngineUnavailableError: no engine accepts requests, or they serve another model.
            InvalidRequestError: the request is too large to send.
            DeadlineExpiredError: its deadline has passed.
        """
        self.route = Route(request.request_id)
        """The engines that got the request."""
        self._pool = pool
        self._request = request
        self._model = model
        self._max_tokens = _max_tokens(request, model)
        self._tokens = array("I")
        self._tried: set[EngineClient] = set()
        self._is_aborted = False
        self._is_admitted = False
        self._is_over = False
        self._weights_version = ""
        self._begun_version: str | None = None
        """Version of the weights that made the first tokens, on an engine that was lost."""
        self._error: Exception | None = None
        self._pending = TokenBatch()
        self._pending_since_s = 0.0
        self._news = asyncio.Event()
        self._turn: Turn | None = None
        self._needs_turn = pool.swapper is not None
        self._abort: Callable[[], None] = self._abort_unsent
        if not self._needs_turn:
            self._send(request)

    async def admitted(self) -> None:
        """Waits until an engine admits the request.

        Raises:
            FrontendError, EngineFaultError: no engine does.
        """
        while True:
            if self._needs_turn:
                await self._take_turn()
            elif self._error is not None:
                self._go_on_elsewhere(self._error)
            elif self._is_admitted or self._is_over:
                return
            else:
                await self._wait()

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all of them; must not be called after the last batch.

        Raises:
            FrontendError, EngineFaultError: no engine continues the request.
        """
        while not self._pending.token_ids:
            if self._needs_turn:
                await self._take_turn()
            elif self._error is not None:
                self._go_on_elsewhere(self._error)
            elif self._is_over:
                break
            else:
                await self._wait()
        batch, self._pending = self._pending, TokenBatch()
        if batch.token_ids:
            self.route.unread_s += time.monotonic() - self._pending_since_s
            self._tokens.extend(batch.token_ids)
            self._tried.clear()
        return batch

    def abort(self) -> None:
        """Ends an unfinished request early; the engine still reports its usage."""
        self._is_aborted = True
        if not self._is_over:
            self._abort()

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Appends tokens."""
        if self._is_over:  # as it was ended here
            return
        self._is_admitted = True
        if token_ids and self._turn is not None:
            self._turn.has_progressed = True
        if token_ids and not self._pending.token_ids:
            self._pending_since_s = time.monotonic()
        room = self._max_tokens - len(self._tokens) - len(self._pending.token_ids)
        self._pending.token_ids += token_ids[:room]
        self._pending.logprobs += logprobs[:room]
        self._pending.prompt_logprobs += prompt_logprobs
        if len(token_ids) > room:
            self._end_overrun()
        self._news.set()

    def put_admitted(self, weights_version: str) -> None:
        """Notes that the engine has admitted the request, and the version of its weights."""
        self._weights_version = weights_version
        self.put((), ())

    def put_finished(self, finished: Finished) -> None:
        """Ends the request successfully."""
        if self._is_over:
            return
        begun = self._begun_version
        if begun is not None and begun != finished.usage.weights_version:
            finished.usage.first_weights_version = begun
        self._pending.finish_reason = finished.finish_reason
        self._pending.usage = finished.usage
        self._pending.vector = finished.vector
        if finished.HasField("stop_token_id"):
            self._pending.stop_token_id = finished.stop_token_id
        self._end()

    def put_error(self, error: Exception) -> None:
        """Ends the request with an error."""
        if self._is_over:
            return
        self._end()
        swapper = self._pool.swapper
        if (
            swapper is None
            or self._is_aborted
            or not isinstance(error, EngineUnavailableError)
            or not swapper.is_swapped_out(self._model.model)
        ):
            self._error = error
            return
        self._needs_turn = True
        self._is_over = self._is_admitted = False
        self._abort = self._abort_unsent

    def _end_overrun(self) -> None:
        """Ends the request, of which the engine has sent more tokens than it may have."""
        self._pending.finish_reason = LENGTH
        self._pending.usage = Usage(
            prompt_tokens=_num_prompt_tokens(self._request), output_tokens=self._max_tokens
        )
        self._end()
        self._abort()
        self._pool.counts.num_overruns += 1
        log.warning(
            "engine_overran_request",
            request_id=self._request.request_id,
            engine=self._engine.address.target,
            max_tokens=self._max_tokens,
        )

    def _end(self) -> None:
        """Takes nothing more of this engine, and ends the turn at its card."""
        self._is_over, self._needs_turn = True, False
        if self._turn is not None:
            self._turn.end()
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _take_turn(self) -> None:
        """Waits for the model's turn at the card it shares, and sends the request."""
        swapper = self._pool.swapper
        assert swapper is not None, "there are turns only at shared cards"
        self._turn = swapper.ask(self._model.model, was_refused=self._turn is not None)
        self._needs_turn = False
        self._pending = TokenBatch()  # what is unread is computed again
        if not await self._turn.wait(self._request.deadline_s) or self._is_over:
            return
        try:
            self._send(self._continued())
        except BaseException:
            self._turn.end()
            raise

    def _abort_unsent(self) -> None:
        """Ends a request that no engine has."""
        usage = Usage(
            prompt_tokens=_num_prompt_tokens(self._request),
            output_tokens=len(self._tokens) + len(self._pending.token_ids),
        )
        self.put_finished(Finished(finish_reason=ABORTED, usage=usage))

    def _continued(self) -> EngineRequest:
        """Returns the request with its tokens so far."""
        tokens = self._tokens
        if not tokens:
            return self._request
        return replace(
            self._request,
            prompt_token_ids=self._request.prompt_token_ids + pack_uint32(tokens),
            num_resumed_tokens=len(tokens),
        )

    def _send(self, request: EngineRequest) -> None:
        self._engine, self._abort = self._pool.send(
            request, self, model=self._model, tried=self._tried
        )
        self.route.visits.append(Visit(self._engine.address.target))

    def _go_on_elsewhere(self, error: Exception) -> None:
        """Sends the request with its tokens so far to an engine that was not tried."""
        if not isinstance(error, EngineUnavailableError | OverloadedError):
            raise self._refusal(error)
        lost, tokens = self._engine, self._tokens
        self._tried.add(lost)
        if self._is_aborted or len(self._tried) >= self._pool.limits.max_attempts:
            raise error
        try:
            self._send(self._continued())
        except EngineUnavailableError:
            raise error from None  # the engine's reason says more than "no other engine"
        except InvalidRequestError as refusal:
            raise self._refusal(refusal) from None
        self.route.visits[-2].left_because = str(error)
        self._is_admitted = self._is_over = False
        self._error = None
        self._pending = TokenBatch()
        if tokens:
            if self._begun_version is None:
                self._begun_version = self._weights_version
            self._pool.counts.num_migrations += 1
        else:
            self._pool.counts.num_retries += 1
        log.info(
            "request_rerouted",
            request_id=self._request.request_id,
            reason=str(error),
            engine=lost.address.target,
            next_engine=self._engine.address.target,
            output_tokens=len(tokens),
        )

    def _refusal(self, error: Exception) -> Exception:
        """Returns the error for the caller, who did not write the continued request."""
        is_refusal = isinstance(error, InvalidRequestError | DuplicateRequestError)
        if is_refusal and self._tried and self._tokens:
            return EngineUnavailableError(
                f"the engine was lost after {len(self._tokens)} tokens, and another cannot go on:"
                f" {error}"
            )
        return error


def _max_tokens(request: EngineRequest, model: ModelInfo) -> int:
    """Returns the most output tokens of a request, as an engine counts them."""
    room = max(0, model.max_model_len - _num_prompt_tokens(request))
    sampling = request.sampling
    if sampling is None or not sampling.HasField("max_tokens"):
        return room
    return min(sampling.max_tokens, room)


def _num_prompt_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) // TOKEN_BYTES
