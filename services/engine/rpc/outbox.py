"""A session's unsent messages and flow control."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from protos.engine.v1.engine_pb2 import Admitted, EngineMessage
from services.engine.config.serving import ServingConfig
from services.engine.errors import SlowReaderError
from services.engine.request import Request, RequestOutput
from services.engine.rpc.step_columns import StepColumns

MAX_QUEUED_ANSWERS = 1024
"""Most unsent answers; a session with more reads no submissions."""


class Outbox:
    """Holds answers in order, and step output in one message that grows while the frontend lags.

    `put` only gathers, so the step loop never waits. The outbox gives up a frontend that reads
    nothing for slow_reader_timeout_s while output waits, or whose lag exceeds one message.
    """

    def __init__(self, config: ServingConfig) -> None:
        """Takes the window, the interval and the limits from `config`."""
        self._window = config.credit_window
        self._heartbeat_interval_s = config.heartbeat_interval_ms / 1000
        self._timeout_s = config.slow_reader_timeout_s
        self._max_bytes = config.max_message_bytes // 2
        self._answers: deque[EngineMessage] = deque()
        self._columns = StepColumns()
        self._steps_sent = 0
        self._steps_read = 0
        self._stalled_since_s: float | None = None
        self._writing_since_s: float | None = None
        """When the write began that the transport has not taken yet."""
        self._heartbeat_is_due = False
        self._is_closing = False
        self._has_failed = False
        self._failure: BaseException | None = None
        """The error that ends sending."""
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, output: RequestOutput) -> None:
        """Gathers one request's output of one step."""
        if not self._has_failed:
            self._columns.add(output)

    def put_tokens(self, requests: Sequence[Request], handles: bytes, token_ids: bytes) -> None:
        """Gathers one token of each of several requests; see `OutputSink.put_tokens`."""
        del requests  # their handles are all that goes out
        if not self._has_failed:
            self._columns.add_tokens(handles, token_ids)

    def flush(self) -> None:
        """Releases a gathered step for sending."""
        if self._columns.num_bytes > self._max_bytes:
            self.fail(SlowReaderError(f"{self._columns.num_bytes} bytes of output lay unread"))
        self._wake.set()

    def admit(self, request: Request) -> None:
        """Confirms a request to the frontend."""
        admitted = Admitted(handle=request.handle, weights_version=request.weights_version)
        self.answer(EngineMessage(admitted=admitted))

    def answer(self, message: EngineMessage) -> None:
        """Queues a message to send before all step output gathered so far."""
        self._answers.append(message)
        if len(self._answers) >= MAX_QUEUED_ANSWERS:
            self._has_room.clear()
        self._wake.set()

    def credit(self, steps_read: int) -> None:
        """Records how many step messages the frontend has read since the session began."""
        self._steps_read = max(self._steps_read, min(steps_read, self._steps_sent))
        self._stalled_since_s = None
        self._wake.set()

    def holds_ending_of(self, handle: int) -> bool:
        """Whether the end of a request is still unsent."""
        return self._columns.has_ending_of(handle)

    async def wait_for_room(self) -> None:
        """Returns when there is room for an answer, which limits submissions."""
        await self._has_room.wait()

    def close(self) -> None:
        """Ends `send` once everything is sent, regardless of the window."""
        self._is_closing = True
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Ends `send` with this error; later output is dropped."""
        if not self._has_failed:
            self._has_failed = True
            self._failure = error
        self._wake.set()

    async def send(
        self,
        write: Callable[[EngineMessage], Awaitable[None]],
        make_heartbeat: Callable[[], EngineMessage],
    ) -> None:
        """Writes until the outbox is closed and empty.

        Args:
            write: sends one message; returns when the transport has taken it.
            make_heartbeat: makes a heartbeat of the present state.

        Raises:
            SlowReaderError: the frontend did not read.
            BaseException: the argument of `fail`.
        """
        ticking = asyncio.create_task(self._tick())
        try:
            async with asyncio.timeout(None) as limit:
                watching = asyncio.create_task(self._watch_writes(limit))
                try:
                    await self._send(write, make_heartbeat)
                finally:
                    watching.cancel()
        except TimeoutError:
            raise self._slow_reader() from None
        finally:
            ticking.cancel()

    async def _send(
        self,
        write: Callable[[EngineMessage], Awaitable[None]],
        make_heartbeat: Callable[[], EngineMessage],
    ) -> None:
        while not self._has_failed:
            message = self._next_message(make_heartbeat)
            if message is not None:
                self._writing_since_s = time.monotonic()
                await write(message)  # flow control blocks it while the peer reads nothing
                self._writing_since_s = None
            elif self._is_closing:
                return
            else:
                self._wake.clear()
                await self._wake.wait()
        raise self._take_failure()

    def _take_failure(self) -> BaseException:
        """Returns and drops the failure, whose traceback refers to the session."""
        failure, self._failure = self._failure, None
        assert failure is not None, "a failure is taken once"
        return failure

    def _next_message(self, make_heartbeat: Callable[[], EngineMessage]) -> EngineMessage | None:
        if self._heartbeat_is_due:
            self._heartbeat_is_due = False
            return make_heartbeat()
        if self._answers:
            self._has_room.set()
            return self._answers.popleft()
        if self._columns and (self._is_within_window() or self._is_closing):
            columns, self._columns = self._columns, StepColumns()
            self._steps_sent += 1
            return columns.to_message()
        return None

    def _is_within_window(self) -> bool:
        return self._steps_sent - self._steps_read < self._window

    async def _watch_writes(self, limit: asyncio.Timeout) -> None:
        """Ends sending when a write has taken too long; a timer for each costs more than it."""
        left_s = self._timeout_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            since_s, left_s = self._writing_since_s, self._timeout_s
            if since_s is not None:
                left_s += since_s - time.monotonic()
        limit.reschedule(0)

    async def _tick(self) -> None:
        """Schedules heartbeats and gives up a stalled frontend."""
        while True:
            self._heartbeat_is_due = True
            self._wake.set()
            await asyncio.sleep(self._heartbeat_interval_s)
            now_s = time.monotonic()
            if not self._columns or self._is_within_window():
                self._stalled_since_s = None
            elif self._stalled_since_s is None:
                self._stalled_since_s = now_s
            elif now_s - self._stalled_since_s >= self._timeout_s:
                self.fail(self._slow_reader())

    def _slow_reader(self) -> SlowReaderError:
        return SlowReaderError(f"output lay unread for {self._timeout_s} s")
