"""One request's tokens, whichever engines make them."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace

import structlog

from protos.engine.v1.engine_pb2 import Finished
from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.messages import (
    EngineRequest,
    ModelInfo,
    PositionLogprobs,
    TokenBatch,
    pack_uint32,
)
from services.frontend.engine_client.pool import EnginePool
from services.frontend.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)

log = structlog.get_logger()


class TokenStream:
    """A request's output. Where its engine refuses it or is lost, another one goes on.

    The next engine gets the prompt with all tokens that came so far, and says nothing of those
    again; sampling is a function of the seed and the position, so it chooses what the first one
    would have chosen. Each engine is tried once until there is another token; a request that ends
    its engines therefore ends `PoolLimits.max_attempts` of them at most.

    Tokens that nobody has read yet wait here and are read in one batch, so a slow reader costs
    fewer, larger messages and holds up nobody. The request's own length bounds what can wait.
    """

    def __init__(self, pool: EnginePool, request: EngineRequest, *, model: ModelInfo) -> None:
        """Sends the request.

        Args:
            pool: the engines.
            request: what to run; its sampling has a seed.
            model: the model whose tokenizer made the prompt. Engines with another refuse it.

        Raises:
            EngineUnavailableError: there is no engine now, or another model is served.
            InvalidRequestError: the request is too large to send.
            DeadlineExpiredError: its time is over.
        """
        self._pool = pool
        self._request = request
        self._model = model
        self._tokens = array("I")
        self._tried: set[EngineClient] = set()
        self._is_aborted = False
        self._is_admitted = False
        self._is_over = False
        self._error: Exception | None = None
        self._pending = TokenBatch()
        self._news = asyncio.Event()
        self._send(request)

    async def admitted(self) -> None:
        """Waits until an engine has taken the request.

        Raises:
            FrontendError, EngineFaultError: none has.
        """
        while True:
            if self._error is not None:
                self._go_on_elsewhere(self._error)
            elif self._is_admitted or self._is_over:
                return
            else:
                await self._wait()

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all there are. After the last batch there is nothing to read.

        Raises:
            FrontendError, EngineFaultError: the request failed, its tokens are read, and no engine
                goes on with it.
        """
        while not self._pending.token_ids:
            if self._error is not None:
                self._go_on_elsewhere(self._error)
            elif self._is_over:
                break
            else:
                await self._wait()
        batch, self._pending = self._pending, TokenBatch()
        if batch.token_ids:
            self._tokens.extend(batch.token_ids)
            self._tried.clear()
        return batch

    def abort(self) -> None:
        """Ends the request early, unless it is over; the engine still says what it cost."""
        self._is_aborted = True
        if not self._is_over:
            self._abort()

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Takes new tokens; without any, the news that the engine has taken the request."""
        self._is_admitted = True
        self._pending.token_ids += token_ids
        self._pending.logprobs += logprobs
        self._pending.prompt_logprobs += prompt_logprobs
        self._news.set()

    def put_finished(self, finished: Finished) -> None:
        """Takes the end of a request that was served."""
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

    def _send(self, request: EngineRequest) -> None:
        self._engine, self._abort = self._pool.send(
            request, self, model=self._model, tried=self._tried
        )

    def _go_on_elsewhere(self, error: Exception) -> None:
        """Sends the request, as far as it is, to an engine that was not tried yet.

        Raises:
            FrontendError, EngineFaultError: `error`, where that makes no sense or no engine is
                left.
        """
        if not isinstance(error, EngineUnavailableError | OverloadedError):
            raise self._refusal(error)
        lost, tokens = self._engine, self._tokens
        self._tried.add(lost)
        if self._is_aborted or len(self._tried) >= self._pool.limits.max_attempts:
            raise error
        try:
            self._send(
                replace(
                    self._request,
                    prompt_token_ids=self._request.prompt_token_ids + pack_uint32(tokens),
                    num_resumed_tokens=len(tokens),
                )
            )
        except EngineUnavailableError:
            raise error from None  # what the engine said tells more than that there is no other
        except InvalidRequestError as refusal:
            raise self._refusal(refusal) from None
        self._is_admitted = self._is_over = False
        self._error = None
        self._pending = TokenBatch()
        if tokens:
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
        """Returns the error for the caller, who has no part in how a request goes on."""
        is_refusal = isinstance(error, InvalidRequestError | DuplicateRequestError)
        if is_refusal and self._tried and self._tokens:
            return EngineUnavailableError(
                f"the engine was lost after {len(self._tokens)} tokens, and another cannot go on:"
                f" {error}"
            )
        return error
