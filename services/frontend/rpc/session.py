"""A client's stream with many requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import FinishReason, Usage
from protos.frontend.v1 import frontend_pb2
from services.frontend.access.caller import Lease
from services.frontend.access.held_bytes import HeldBytes
from services.frontend.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Options, Output, Prompt
from services.frontend.pipeline.samples import Samples
from services.frontend.rpc.convert import (
    conversation_of,
    options_of,
    output_to_proto,
    prompt_of,
    refuse_unknown_fields,
)
from services.frontend.rpc.status import failure_of
from services.frontend.rpc.writer import Writer
from services.transport.message_limits import first_number
from services.transport.message_reader import RefusedMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session."""

    max_live_requests: int
    max_prompt_bytes: int
    """Longest prompt that comes in parts."""
    idle_timeout_s: float
    """Time without requests and messages after which the session ends."""


@dataclass(slots=True, eq=False)
class _LiveRequest:
    """A request between its first message and its end."""

    session: "ClientSession"
    handle: int
    options: Options
    lease: Lease
    collected: list[bytes] | None = None
    """The parts of the prompt so far; None once it is complete."""
    is_ended: bool = False
    """Whether the client cancelled it or it failed."""
    error: Exception | None = None
    """Why it failed; None if cancelled."""
    work: asyncio.Task[None] | None = None
    generation: Generation | Samples | None = None

    @property
    def is_collecting(self) -> bool:
        """Whether more parts of the prompt are expected."""
        return self.collected is not None

    def end(self, error: Exception | None) -> None:
        """Fails it with `error`, or cancels it. Its own task answers the client."""
        self.is_ended = True
        self.error = error
        if self.generation is not None:
            self.generation.cancel()
        elif self.work is not None:
            self.work.cancel()

    async def begin(self, generation: Generation | Samples) -> None:
        """Stores the admitted generation, which can be cancelled."""
        self.generation = generation

    async def write(self, output: Output) -> None:
        """Writes new output."""
        if self.error is not None:
            return  # the handle may belong to another request
        if output.usage is not None:
            self.session.forget(self)  # the client may use the handle again
        await self.session.write(self.handle, output=output_to_proto(output))


class ClientSession:
    """Reads a client's messages and answers each request under its handle.

    Requests run concurrently and fail separately. Output that waits to be written is merged.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        writer: Writer,
        *,
        draining: asyncio.Event,
        time_remaining: Callable[[], float | None],
        traceparent: str,
        address: str,
        parts: HeldBytes,
        limits: SessionLimits,
    ) -> None:
        """Serves nothing until `run`; `parts` counts prompts that come in parts."""
        self._pipeline = pipeline
        self._writer = writer
        self._draining = draining
        self._time_remaining = time_remaining
        self._traceparent = traceparent
        self._address = address
        self._parts = parts
        self._limits = limits
        self._num_messages = 0
        self._live: dict[int, _LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, messages: AsyncIterator[frontend_pb2.SessionRequest | RefusedMessage]
    ) -> None:
        """Serves until the client closes its side and all requests have ended.

        Raises:
            MalformedMessageError: a message over the limits has no readable handle.
            SlowReaderError: the client does not read.
            EngineUnavailableError: the frontend is draining, or the session was idle too long.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(self._end_when_drained()),
                    group.create_task(self._end_when_idle()),
                ]
                async for message in messages:
                    self._num_messages += 1
                    if isinstance(message, RefusedMessage):
                        await self._refuse(message)
                    else:
                        await self._take(message, group)
                    del message  # a cancelled call keeps this frame for a while
                await self._fail_incomplete()
                for task in watching:
                    task.cancel()
        except ExceptionGroup as failures:
            # All requests share the stream, so one reason applies to all.
            raise failures.exceptions[0] from None
        finally:
            self._drop_all_parts()
            self._live.clear()

    def forget(self, live: _LiveRequest) -> None:
        """Frees a request's handle, unless another request has taken it."""
        if self._live.get(live.handle) is live:
            del self._live[live.handle]

    async def write(
        self,
        handle: int,
        *,
        output: frontend_pb2.Output | None = None,
        failure: Failure | None = None,
    ) -> None:
        """Writes output or a failure under a handle."""
        response = frontend_pb2.SessionResponse(handle=handle, output=output, failure=failure)
        await self._writer.write(response)

    async def _fail_incomplete(self) -> None:
        """Fails the requests with incomplete prompts after the client has closed its side."""
        for live in list(self._live.values()):
            if live.is_collecting:
                await self._fail(
                    live.handle,
                    InvalidRequestError("the stream ended before the prompt's last part"),
                )

    async def _end_when_drained(self) -> None:
        await self._draining.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)
        raise EngineUnavailableError("the frontend is draining")

    async def _end_when_idle(self) -> None:
        """Ends the session after a whole interval without requests and messages."""
        was_idle_after: int | None = None
        while was_idle_after != self._num_messages:
            was_idle_after = None if self._tasks else self._num_messages
            await asyncio.sleep(self._limits.idle_timeout_s)
            if self._tasks:
                was_idle_after = None
        raise EngineUnavailableError(f"the session was idle for {self._limits.idle_timeout_s:g} s")

    async def _take(self, message: frontend_pb2.SessionRequest, group: asyncio.TaskGroup) -> None:
        try:
            await self._handle(message, group)
        except Exception as error:  # noqa: BLE001  a request's failure is its own
            await self._fail(message.handle, error)

    async def _refuse(self, message: RefusedMessage) -> None:
        """Fails the request of a message over the limits."""
        handle = first_number(message.data, frontend_pb2.SessionRequest.HANDLE_FIELD_NUMBER)
        if handle is None:
            raise message.error
        await self._fail(handle & 0xFFFFFFFF, InvalidRequestError(str(message.error)))

    async def _handle(self, message: frontend_pb2.SessionRequest, group: asyncio.TaskGroup) -> None:
        refuse_unknown_fields(message)
        handle = message.handle
        match message.WhichOneof("message"):
            case "generate":
                with self._opening(message, message.generate.options) as live:
                    limit = self._pipeline.models.max_prompt_tokens
                    self._start(live, prompt_of(message.generate, max_tokens=limit), group)
            case "chat":
                with self._opening(message, message.chat.options) as live:
                    self._start(live, conversation_of(message.chat), group)
            case "prompt_part":
                self._take_part(message, group)
            case "cancel":
                await self._cancel(handle)
            case _:
                raise InvalidRequestError("the message is empty")

    def _open(self, handle: int, options: Options) -> _LiveRequest:
        if self._draining.is_set():
            raise EngineUnavailableError("the frontend is draining")
        if handle in self._live:
            raise DuplicateRequestError(
                f"handle {handle} was used again while its request was live; the request is ended"
            )
        if len(self._live) >= self._limits.max_live_requests:
            raise OverloadedError(
                f"the session has {len(self._live)} live requests, which is the limit",
                retry_after_ms=None,
            )
        lease = self._pipeline.begin(options.request_id, self._address, method="Session")
        live = self._live[handle] = _LiveRequest(self, handle, options, lease)
        return live

    @contextmanager
    def _opening(
        self, message: frontend_pb2.SessionRequest, options: frontend_pb2.GenerationOptions
    ) -> Iterator[_LiveRequest]:
        """Opens the request of a message; closes it again if the message is refused."""
        live = self._open(message.handle, options_of(options))
        live.lease.num_bytes = message.ByteSize()
        try:
            yield live
        except Exception:
            del self._live[live.handle]
            live.lease.charge_refusal()
            live.lease.close()
            raise

    def _start(self, live: _LiveRequest, prompt: Prompt, group: asyncio.TaskGroup) -> None:
        task = group.create_task(self._serve(live, prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not at the end of the task, which may be cancelled before it begins.
        task.add_done_callback(lambda _: live.lease.close())

    def _take_part(self, message: frontend_pb2.SessionRequest, group: asyncio.TaskGroup) -> None:
        handle, part = message.handle, message.prompt_part
        live = self._live.get(handle)
        is_first = live is None
        if live is None:
            live = self._open(handle, options_of(part.options))
            live.collected = []
        if live.collected is None:
            raise DuplicateRequestError(
                f"handle {handle} got a prompt part while its request was running;"
                " the request is ended"
            )
        if not is_first and part.HasField("options"):
            raise InvalidRequestError("only the first part of a prompt has options")
        live.lease.caller.check_known()
        self._collect(live, part.text.encode())
        if part.last:
            prompt = b"".join(live.collected).decode()
            self._release_parts(live)
            self._start(live, prompt, group)

    def _collect(self, live: _LiveRequest, text: bytes) -> None:
        """Adds a part to a prompt.

        Raises:
            InvalidRequestError: the prompt is too long.
            OverloadedError: prompts in parts take too much memory.
        """
        assert live.collected is not None, "a prompt that comes in parts"
        limit = self._limits.max_prompt_bytes
        num_bytes = live.lease.num_bytes + len(text)
        if num_bytes > limit:
            raise InvalidRequestError(f"the prompt has {num_bytes} bytes; the limit is {limit}")
        self._parts.take(live.lease.account, len(text))
        live.lease.num_bytes = num_bytes
        live.collected.append(text)

    def _release_parts(self, live: _LiveRequest) -> None:
        self._parts.give_back(live.lease.account, live.lease.num_bytes)
        live.collected = None

    def _drop_parts(self, live: _LiveRequest) -> None:
        """Ends a request whose prompt is incomplete, and charges what came of it."""
        if live.is_collecting:
            self._release_parts(live)
            live.lease.charge_refusal()
            live.lease.close()

    def _drop_all_parts(self) -> None:
        for live in self._live.values():
            self._drop_parts(live)

    async def _cancel(self, handle: int) -> None:
        live = self._live.get(handle)
        if live is None or live.is_ended:
            return  # it has just ended
        if live.is_collecting:
            self._drop_parts(live)
            del self._live[handle]
            await self.write(handle, output=_aborted(live))
        else:
            live.end(None)

    async def _fail(self, handle: int, error: Exception) -> None:
        """Ends the request of a handle, if there is one, and answers with the error."""
        live = self._live.get(handle)
        if live is not None and not live.is_collecting:
            live.end(error)
            return
        if live is not None:
            self._drop_parts(live)
            del self._live[handle]
        await self.write(handle, failure=failure_of(error))

    async def _serve(self, live: _LiveRequest, prompt: Prompt) -> None:
        """Runs a request; answers if it fails or is cancelled."""
        live.work = asyncio.create_task(self._generate(live, prompt))
        if live.is_ended:
            live.work.cancel()
        # A request's error must not end the others.
        [error] = await asyncio.gather(live.work, return_exceptions=True)
        live.work = None  # it refers to the error, whose traceback refers to the request
        self.forget(live)
        if live.is_ended and isinstance(error, asyncio.CancelledError):
            error = live.error
            if error is None:
                await self.write(live.handle, output=_aborted(live))
        if error is not None:
            await self.write(live.handle, failure=failure_of(error))

    async def _generate(self, live: _LiveRequest, prompt: Prompt) -> None:
        options = live.options
        watching = self._pipeline.requests.watch(
            options.request_id,
            method="Session",
            traceparent=options.traceparent or self._traceparent,
        )
        with live.lease, watching as record:
            await self._pipeline.serve(
                prompt,
                options,
                live,
                record=record,
                lease=live.lease,
                timeout_s=self._time_remaining(),
            )
            if live.error is not None:
                raise live.error


def _aborted(live: _LiveRequest) -> frontend_pb2.Output:
    """Returns the last output of a request cancelled before its admission."""
    return frontend_pb2.Output(
        request_id=live.options.request_id,
        finish_reason=FinishReason.FINISH_REASON_ABORTED,
        usage=Usage(),
    )
