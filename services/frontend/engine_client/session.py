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
    DropImages,
    EngineHello,
    EngineMessage,
    Finished,
    FrontendMessage,
    Image,
    StepOutput,
    Submit,
)
from services.frontend.engine_client.circuit_breaker import CircuitBreaker
from services.frontend.engine_client.engine_view import EngineView
from services.frontend.engine_client.image_uploads import ImageUploads
from services.frontend.engine_client.messages import (
    ABORTED,
    TOKEN_BYTES,
    EngineRequest,
    TokenSink,
    Usage,
    error_of,
    read_uint32,
)
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.errors import (
    DeadlineExpiredError,
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.transport.server_status import ServerStatus

ReadinessHandler = Callable[[bool], None]
"""Gets whether the engine accepts requests."""
SILENCE_CHECKS = 5
"""Silent checks in a row after which the engine is lost. A delay of the frontend itself costs one
check, not all."""
IMAGE_WAIT_S = 30.0
"""Time limit of a request's wait for room in the engine's memory of images."""
IMAGE_RETRY_MS = 1000
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
        max_image_bytes: int,
        counts: RoutingCounts,
        silence_timeout_s: float,
    ) -> None:
        """Takes over a stream after both hellos; see `session_opening`."""
        self.hello = hello
        self.is_draining = False
        self.view = EngineView()
        self._call = call
        self._status = status
        self._breaker = breaker
        self._max_message_bytes = max_message_bytes
        self._silence_timeout_s = silence_timeout_s
        self._sinks: dict[int, TokenSink] = {}
        self._counts = counts
        self._images = ImageUploads(max_bytes=max_image_bytes, on_sent=self._submit_uploaded)
        self._uploading: dict[int, tuple[Submit, EngineRequest]] = {}
        """Requests whose images the engine has not got, by handle."""
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
            DeadlineExpiredError: its deadline has passed.
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
            images=[
                Image(digest=each.digest, offset=each.offset, num_tokens=each.num_tokens)
                for each in request.images
            ],
            pool=request.pool,
            adapter=request.adapter,
        )
        # A message over the limit would end the stream and all its requests.
        if submit.ByteSize() > self._max_message_bytes - 64:
            raise InvalidRequestError(
                f"the request takes {submit.ByteSize()} bytes; the limit is"
                f" {self._max_message_bytes - 64}"
            )
        if request.images:
            self._images.add(submit.handle, request.images)
            self._uploading[submit.handle] = submit, request
            if self._images.is_waiting(submit.handle):
                loop = asyncio.get_running_loop()
                loop.call_later(_image_wait_s(submit), self._end_wait, submit.handle)
        else:
            self._submits.append(submit)
        self._sinks[submit.handle] = sink
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
                    sink.put_admitted(message.admitted.weights_version)
            case "rejected":
                if sink := self._let_go(message.rejected.handle):
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
        if handles or any(finished.vector for finished in step.finished):
            self._breaker.note_success()
        self._take_ends(step.finished)

    def _take_ends(self, ends: Iterable[Finished]) -> None:
        has_failed = False
        for finished in ends:
            sink = self._let_go(finished.handle)
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

    def _let_go(self, handle: int) -> TokenSink | None:
        """Forgets a request that has ended; returns where its output went."""
        self._images.release(handle)
        self._uploading.pop(handle, None)
        self._has_outgoing.set()
        return self._sinks.pop(handle, None)

    def _abort(self, handle: int) -> None:
        if handle not in self._uploading:
            self._aborts.append(handle)
            self._has_outgoing.set()
            return
        submit, _ = self._uploading[handle]  # the engine does not know it
        usage = Usage(prompt_tokens=len(submit.prompt_token_ids) // TOKEN_BYTES)
        if sink := self._let_go(handle):
            sink.put_finished(Finished(handle=handle, finish_reason=ABORTED, usage=usage))

    def _submit_uploaded(self, handle: int) -> None:
        """Sends a request whose images the engine has."""
        submit, request = self._uploading.pop(handle)
        try:
            timeout_ms = request.timeout_ms
        except DeadlineExpiredError as error:
            if sink := self._let_go(handle):
                sink.put_error(error)
            return
        if timeout_ms is not None:
            submit.timeout_ms = timeout_ms
        self._submits.append(submit)
        self._has_outgoing.set()

    def _end_wait(self, handle: int) -> None:
        """Refuses a request that still waits for room in the engine's memory of images."""
        if not self._images.is_waiting(handle):
            return
        submit, _ = self._uploading[handle]
        error: Exception = OverloadedError(
            "the engine's memory for images is full", retry_after_ms=IMAGE_RETRY_MS
        )
        if _image_wait_s(submit) < IMAGE_WAIT_S:
            error = DeadlineExpiredError("the request's deadline passed before an engine got it")
        if sink := self._let_go(handle):
            sink.put_error(error)

    async def _write(self) -> str:
        try:
            while True:
                await self._has_outgoing.wait()
                self._has_outgoing.clear()
                for message in self._take_outgoing():
                    await self._call.write(message)
                # One part, so that other messages wait for no more.
                if (part := self._images.next_part()) is not None:
                    self._counts.num_image_bytes += len(part.patches)
                    await self._call.write(FrontendMessage(image_part=part))
                if self._images.has_work:
                    self._has_outgoing.set()
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
        if drops := self._images.take_drops():
            messages.append(FrontendMessage(drop_images=DropImages(digests=drops)))
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
        self._uploading.clear()
        self.is_draining = True  # refuses further submissions
        for sink in sinks:
            sink.put_error(error)


def _image_wait_s(submit: Submit) -> float:
    """Returns how long a request may wait for room, at most until its deadline."""
    if not submit.HasField("timeout_ms"):
        return IMAGE_WAIT_S
    return min(IMAGE_WAIT_S, submit.timeout_ms / 1000)
