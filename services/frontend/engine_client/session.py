"""The stream that carries all requests of this frontend to one engine."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc

from protos.engine.v1.engine_pb2 import (
    Abort,
    Credit,
    EngineHello,
    EngineMessage,
    Finished,
    FrontendHello,
    FrontendMessage,
    StepOutput,
    Submit,
)
from services.frontend.engine_client.circuit_breaker import CircuitBreaker
from services.frontend.engine_client.engine_view import EngineView
from services.frontend.engine_client.messages import (
    EngineRequest,
    TokenSink,
    error_of,
    read_uint32,
)
from services.frontend.engine_client.prefix_keys import PREFIX_KEY_VERSION
from services.frontend.errors import (
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
)
from services.transport.server_status import ServerStatus

ReadinessHandler = Callable[[bool], None]
"""Gets whether the engine accepts requests."""
SILENCE_CHECKS = 5
"""Silent checks in a row after which the engine is lost. A delay of the frontend itself costs one
check, not all."""
_COUNTED_ERRORS = (EngineUnavailableError, EngineFaultError)
"""Failures of the engine rather than the request."""


class EngineSession:
    """Sends submissions and aborts, and receives packed steps, over one stream."""

    def __init__(
        self,
        call: Any,
        status: ServerStatus,
        hello: EngineHello,
        *,
        breaker: CircuitBreaker,
        max_message_bytes: int,
        silence_timeout_s: float,
    ) -> None:
        """Takes over a stream after both hellos; see `open_session`."""
        self.hello = hello
        self.is_draining = False
        self.view = EngineView()
        self._call = call
        self._status = status
        self._breaker = breaker
        self._max_message_bytes = max_message_bytes
        self._silence_timeout_s = silence_timeout_s
        self._sinks: dict[int, TokenSink] = {}
        self._last_handle = 0
        self._submits: deque[Submit] = deque()
        self._aborts: list[int] = []
        self._steps_read = 0
        self._steps_credited = 0
        self._has_credit_due = False
        self._has_outgoing = asyncio.Event()
        self._was_heard = False

    @property
    def num_live(self) -> int:
        """Unfinished requests."""
        return len(self._sinks)

    def submit(self, request: EngineRequest, sink: TokenSink) -> Callable[[], None]:
        """Sends a request, whose output goes to `sink`; returns the function that aborts it.

        Raises:
            InvalidRequestError: it is too large to send.
            EngineUnavailableError: the engine is draining.
        """
        if self.is_draining:
            raise EngineUnavailableError("the engine is draining")
        self._last_handle = self._last_handle % (2**32 - 1) + 1
        submit = Submit(
            handle=self._last_handle,
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            num_resumed_tokens=request.num_resumed_tokens,
            sampling=request.sampling,
            priority=request.priority,
            timeout_ms=request.timeout_ms,
            cache_salt=request.cache_salt,
            caller=request.caller,
            traceparent=request.traceparent,
        )
        # A message over the limit would end the stream and all its requests.
        if submit.ByteSize() > self._max_message_bytes - 64:
            raise InvalidRequestError(
                f"the request takes {submit.ByteSize()} bytes; the limit is"
                f" {self._max_message_bytes - 64}"
            )
        self._sinks[submit.handle] = sink
        self._submits.append(submit)
        self._has_outgoing.set()
        return partial(self._abort, submit.handle)

    def close(self) -> None:
        """Closes a session that does not run."""
        self._call.cancel()

    async def run(self, on_readiness: ReadinessHandler) -> str:
        """Carries messages until the stream ends, then fails the remaining requests.

        Returns:
            Why the stream ended.
        """
        reader = asyncio.create_task(self._read(on_readiness))
        tasks = [
            reader,
            asyncio.create_task(self._write()),
            asyncio.create_task(self._wait_for_silence()),
        ]
        reason = "the frontend is shutting down"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = await (reader if reader in done else done.pop())
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self.is_draining:
                self._breaker.note_failure()
            self._fail_all(EngineUnavailableError(f"lost the engine: {reason}"))
        return reason

    async def _read(self, on_readiness: ReadinessHandler) -> str:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._was_heard = True
                self._take(message, on_readiness)
        return await self._reason()

    async def _reason(self) -> str:
        """Returns why the stream ended, in the engine's words if it said."""
        code, details = await self._status.wait()
        if code == grpc.StatusCode.OK:
            return "it closed the session"
        return f"{code.name}: {details}"

    def _take(self, message: EngineMessage, on_readiness: ReadinessHandler) -> None:
        match message.WhichOneof("message"):
            case "step":
                self._take_step(message.step)
            case "admitted":
                if sink := self._sinks.get(message.admitted.handle):
                    sink.put((), ())
            case "rejected":
                if sink := self._sinks.pop(message.rejected.handle, None):
                    error = error_of(message.rejected.failure)
                    sink.put_error(error)
                    if isinstance(error, _COUNTED_ERRORS):
                        self._breaker.note_failure()
            case "heartbeat":
                self.view.take(message.heartbeat)
                self._offer_credit(1)
                on_readiness(message.heartbeat.ready and not self.is_draining)
            case "draining":
                self.is_draining = True
                on_readiness(False)

    def _take_step(self, step: StepOutput) -> None:
        self._steps_read += 1
        self._offer_credit(max(1, self.hello.credit_window // 4))
        handles = read_uint32(step.handles)
        token_ids = read_uint32(step.token_ids)
        counts = read_uint32(step.num_tokens) if step.num_tokens else [1] * len(handles)
        logprobs = {entry.handle: entry.positions for entry in step.logprobs}
        for entry in step.prompt_logprobs:
            if sink := self._sinks.get(entry.handle):
                sink.put((), (), entry.positions)
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            end = start + count
            if sink := self._sinks.get(handle):
                sink.put(token_ids[start:end], logprobs.get(handle, ()))
            start = end
        if handles:
            self._breaker.note_success()
        self._take_ends(step.finished)

    def _take_ends(self, ends: Iterable[Finished]) -> None:
        has_failed = False
        for finished in ends:
            sink = self._sinks.pop(finished.handle, None)
            if finished.HasField("failure"):
                error = error_of(finished.failure)
                has_failed = has_failed or isinstance(error, _COUNTED_ERRORS)
                if sink is not None:
                    sink.put_error(error)
            elif sink is not None:
                sink.put_finished(finished)
        if has_failed:
            self._breaker.note_failure()  # once: all requests of a lost worker fail together

    def _offer_credit(self, least: int) -> None:
        """Returns credit once `least` steps are owed; credit per step doubles the traffic."""
        if self._steps_read - self._steps_credited >= least:
            self._has_credit_due = True
            self._has_outgoing.set()

    def _abort(self, handle: int) -> None:
        self._aborts.append(handle)
        self._has_outgoing.set()

    async def _write(self) -> str:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                for message in self._take_outgoing():
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return await self._reason()

    def _take_outgoing(self) -> list[FrontendMessage]:
        """Takes everything to send; an abort follows its submission."""
        messages = [FrontendMessage(submit=submit) for submit in self._submits]
        self._submits.clear()
        if self._aborts:
            messages.append(FrontendMessage(abort=Abort(handles=self._aborts)))
            self._aborts.clear()
        if self._has_credit_due:
            self._has_credit_due = False
            self._steps_credited = self._steps_read
            messages.append(FrontendMessage(credit=Credit(steps_read=self._steps_read)))
        return messages

    async def _wait_for_silence(self) -> str:
        num_silent = 0
        while num_silent < SILENCE_CHECKS:
            await asyncio.sleep(self._silence_timeout_s / SILENCE_CHECKS)
            num_silent = 0 if self._was_heard else num_silent + 1
            self._was_heard = False
        return f"it was silent for {self._silence_timeout_s} s"

    def _fail_all(self, error: EngineUnavailableError) -> None:
        sinks = list(self._sinks.values())
        self._sinks.clear()
        self.is_draining = True  # refuses further submissions
        for sink in sinks:
            sink.put_error(error)


async def open_session(
    stub: Any,
    *,
    frontend_id: str,
    breaker: CircuitBreaker,
    max_message_bytes: int,
    silence_timeout_s: float,
    wants_prefixes: bool = True,
) -> EngineSession:
    """Opens the stream and waits for the engine's hello.

    Raises:
        EngineUnavailableError: the engine sent no hello.
    """
    call = stub.Session()
    status = ServerStatus(call)
    try:
        async with asyncio.timeout(silence_timeout_s):
            hello = FrontendHello(frontend_id=frontend_id)
            if wants_prefixes:
                hello.wants_prefixes = True
                hello.prefix_key_version = PREFIX_KEY_VERSION
            await call.write(FrontendMessage(hello=hello))
            message = await call.read()
    except TimeoutError:
        call.cancel()
        raise EngineUnavailableError(
            f"the engine opens no session: it was silent for {silence_timeout_s} s"
        ) from None
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        code, details = await status.wait()
        raise EngineUnavailableError(
            f"the engine opens no session: {code.name}: {details}"
        ) from None
    if message is grpc.aio.EOF or message.WhichOneof("message") != "hello":
        call.cancel()
        raise EngineUnavailableError("the engine opens no session: it did not say hello")
    return EngineSession(
        call,
        status,
        message.hello,
        breaker=breaker,
        max_message_bytes=max_message_bytes,
        silence_timeout_s=silence_timeout_s,
    )
