"""One frontend's multiplexed stream: all its requests in, one packed message per step out."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import structlog

from protos.engine.v1.engine_pb2 import (
    Draining,
    EngineHello,
    EngineMessage,
    FrontendHello,
    FrontendMessage,
    Heartbeat,
    PrefixChanges,
    Rejected,
    Submit,
)
from services.engine.edge.edge import Edge
from services.engine.edge.request_reader import check_known, check_name
from services.engine.edge.session_images import SessionImages
from services.engine.edge.status import count_rejection, failure_of
from services.engine.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
)
from services.engine.kv_cache.prefix_index import PREFIX_KEY_VERSION
from services.engine.kv_cache.prefix_journal import PrefixCursor
from services.engine.request import Request, RequestOutput
from services.engine.rpc.adapter_report import AdapterReport
from services.engine.rpc.outbox import Outbox
from services.engine.structured_output import StructuredOutput
from services.transport.message_reader import RefusedMessage

log = structlog.get_logger()

HELLO_TIMEOUT_S = 10.0
"""Time limit of a frontend's first message."""
MAX_ABORTED = 65536
"""Most requests that one message may end."""
MAX_PREFIX_KEYS = 65536
"""Most keys of cached prefixes in one heartbeat: 512 KiB."""
PREFIX_KEY_BYTES = 8
"""Bytes sent of each key; frontends only use them to guess where a prefix is cached."""


class Session:
    """Serves one Session call, and is the sink of all its requests.

    One task takes the frontend's messages while the call's own task sends from the outbox. The end
    of the stream ends all its requests.
    """

    def __init__(
        self,
        edge: Edge,
        context: grpc.aio.ServicerContext,
        messages: AsyncIterator[FrontendMessage | RefusedMessage],
    ) -> None:
        self._messages = messages
        self._preparing: dict[int, asyncio.Task[None]] = {}
        """Requests, by handle, whose grammar is being compiled."""
        self._core = edge.core
        self._reader = edge.reader
        self._grammars = edge.grammars
        self._config = edge.config.serving
        self._context = context
        self._live: dict[int, Request] = {}
        self._images: SessionImages = self._reader.session_images()
        self._adapters = AdapterReport(edge.core)
        self._wants_prefixes = False
        self._prefix_cursor: PrefixCursor | None = None
        self._outbox = Outbox(self._config)
        self.put_tokens, self.flush = self._outbox.put_tokens, self._outbox.flush

    def put(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        self._outbox.put(output)
        if output.is_last:
            del self._live[output.request.handle]
            self._close_if_drained()

    async def run(self) -> None:
        """Serves the stream until either side ends it.

        Raises:
            EngineUnavailableError: the engine is draining.
            InvalidRequestError, UnsupportedError: the frontend broke the protocol.
            SlowReaderError: the frontend did not read.
        """
        frontend_id = await self._shake_hands()
        log.info("session_opened", frontend_id=frontend_id, peer=self._context.peer())
        receiving = asyncio.create_task(self._receive())
        receiving.add_done_callback(self._end_receiving)
        self._core.drain.listeners.add(self._announce_drain)
        try:
            await self._outbox.send(self._context.write, self._heartbeat)
        finally:
            self._core.drain.listeners.discard(self._announce_drain)
            receiving.cancel()
            del receiving  # an error refers to this frame, and the task to the error
            log.info("session_closed", frontend_id=frontend_id, num_aborted=len(self._live))
            self._abort_all()

    async def _shake_hands(self) -> str:
        """Takes and answers the frontend's hello; returns the frontend's name."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await anext(self._messages, None)
        except TimeoutError:
            raise InvalidRequestError(
                f"a session must begin with hello within {HELLO_TIMEOUT_S:g} s"
            ) from None
        if not isinstance(message, FrontendMessage) or message.WhichOneof("message") != "hello":
            raise InvalidRequestError("the first message of a session must be hello")
        check_known(message)
        frontend_id: str = message.hello.frontend_id
        check_name(frontend_id, "frontend_id")
        self._wants_prefixes = self._can_tell_prefixes(message.hello)
        if self._core.drain.has_begun:
            raise EngineUnavailableError("the engine is draining and opens no new sessions")
        hello = EngineHello(
            engine_id=self._core.engine_id,
            model=self._reader.model.name,
            credit_window=self._config.credit_window,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
        )
        await self._context.write(EngineMessage(hello=hello))
        return frontend_id

    def _can_tell_prefixes(self, hello: FrontendHello) -> bool:
        """Whether the frontend wants cached prefixes and computes their keys alike."""
        version = hello.prefix_key_version or 1
        if hello.wants_prefixes and version != PREFIX_KEY_VERSION:
            log.warning(
                "prefixes_not_reported",
                frontend_id=hello.frontend_id,
                frontend_key_version=version,
                engine_key_version=PREFIX_KEY_VERSION,
            )
        return hello.wants_prefixes and version == PREFIX_KEY_VERSION

    async def _receive(self) -> None:
        """Takes messages until the frontend half-closes the stream."""
        async for message in self._messages:
            if isinstance(message, RefusedMessage):
                raise InvalidRequestError(str(message.error))
            self._handle(message)
            await self._outbox.wait_for_room()

    def _handle(self, message: FrontendMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(message.submit)
            case "abort":
                check_known(message)
                handles = message.abort.handles
                if len(handles) > MAX_ABORTED:
                    raise InvalidRequestError(
                        f"abort has {len(handles)} handles; the limit is {MAX_ABORTED}"
                    )
                for handle in handles:
                    self._abort(handle)
            case "credit":
                check_known(message)
                self._outbox.credit(message.credit.steps_read)
            case "image_part":
                check_known(message)
                self._images.add(message.image_part)
            case "drop_images":
                check_known(message)
                self._images.drop(message.drop_images)
            case "hello":
                raise InvalidRequestError("a session takes one hello, as its first message")
            case _:
                check_known(message)
                raise InvalidRequestError("a message of a session is empty")

    def _submit(self, submit: Submit) -> None:
        handle = submit.handle
        with self._rejecting(handle):
            self._check_is_new(handle)
            self._core.check_ready()
            request = self._reader.from_submit(submit, self, self._images)
            if request.structured_output is None:
                self._admit(request)
            else:
                task = asyncio.create_task(self._prepare(request, request.structured_output))
                self._preparing[handle] = task
                task.add_done_callback(lambda _: self._end_preparing(handle))

    def _check_is_new(self, handle: int) -> None:
        """Raises DuplicateRequestError if the handle is in use."""
        is_taken = handle in self._live or handle in self._preparing
        if is_taken or self._outbox.holds_ending_of(handle):
            raise DuplicateRequestError(f"handle {handle} belongs to a live request")

    def _admit(self, request: Request) -> None:
        """Submits a request to the core and confirms it to the frontend."""
        self._core.submit(request)
        self._live[request.handle] = request
        self._outbox.admit(request)

    async def _prepare(self, request: Request, wanted: StructuredOutput) -> None:
        """Compiles a request's grammar and submits the request to the core."""
        with self._rejecting(request.handle):
            request.constraint = await self._grammars.constrain(
                wanted, request.resumed_token_ids, caller=request.caller
            )
            self._admit(request)

    def _end_preparing(self, handle: int) -> None:
        del self._preparing[handle]
        self._close_if_drained()

    def _abort(self, handle: int) -> None:
        if request := self._live.get(handle):
            self._core.abort(request)
        elif task := self._preparing.get(handle):
            task.cancel()
            self._reject(handle, EngineUnavailableError("the caller gave the request up"))

    @contextmanager
    def _rejecting(self, handle: int) -> Iterator[None]:
        """Rejects a request that fails in the block; others continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  a fault in one request must not end the session
            self._reject(handle, error)

    def _reject(self, handle: int, error: Exception) -> None:
        count_rejection(self._core.counters, error)
        rejected = Rejected(handle=handle, failure=failure_of(error))
        self._outbox.answer(EngineMessage(rejected=rejected))

    def _end_receiving(self, receiving: asyncio.Task[None]) -> None:
        """Ends the stream after a half-close or a protocol error."""
        if receiving.cancelled():
            return
        if error := receiving.exception():
            self._outbox.fail(error)
        else:
            self._abort_all()
            self._outbox.close()

    def _announce_drain(self) -> None:
        self._outbox.answer(EngineMessage(draining=Draining()))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._core.drain.has_begun and not self._live and not self._preparing:
            self._outbox.close()

    def _abort_all(self) -> None:
        for task in self._preparing.values():
            task.cancel()
        for request in list(self._live.values()):
            self._core.abort(request)

    def _heartbeat(self) -> EngineMessage:
        load = self._core.load()
        heartbeat = Heartbeat(
            step_age_ms=int(load.step_age_s * 1000),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_blocks=load.num_free_blocks,
            num_used_blocks=load.num_used_blocks,
            num_recent_tokens=load.num_recent_tokens,
            ready=self._core.is_ready,
            asleep=not self._core.sleep.is_awake,
            prefixes=self._prefix_changes() if self._wants_prefixes else None,
            adapters=self._adapters.changes(),
            weights_salt=self._core.weights.salt,
        )
        return EngineMessage(heartbeat=heartbeat)

    def _prefix_changes(self) -> PrefixChanges:
        max_keys = min(MAX_PREFIX_KEYS, self._config.max_message_bytes // (4 * PREFIX_KEY_BYTES))
        changes = self._core.prefix_changes(self._prefix_cursor, max_keys=max_keys)
        self._prefix_cursor = changes.cursor
        return PrefixChanges(
            reset=changes.is_reset,
            added=b"".join(key[:PREFIX_KEY_BYTES] for key in changes.added),
            removed=b"".join(key[:PREFIX_KEY_BYTES] for key in changes.removed),
        )
