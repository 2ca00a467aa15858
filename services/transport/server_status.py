"""The status with which a server ended a stream, of which a failed write may leave no trace."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

WAIT_S = 1.0
"""Time limit of a server's status that did not come before the write failed."""
_POLL_S = 0.01
_OF_A_FAILED_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")
"""Status that grpc gives a stream that ended under a write."""

CodeAndDetails = tuple[grpc.StatusCode, str]


class ServerStatus:
    """Keeps the status of one call; to be made before the call's first write.

    When a stream ends under a write, grpc puts a status of its own in the place of the server's,
    whether that has come or not (grpc/grpc#36066).
    """

    def __init__(self, call: Any) -> None:
        """Watches a call of `grpc.aio`, whose callbacks are called at its first status alone."""
        self._call = call
        self._first = _OF_A_FAILED_WRITE
        call.add_done_callback(self._keep)

    async def wait(self) -> CodeAndDetails:
        """Waits until the call has ended; returns the server's code and details.

        If the server sent none, these are grpc's own.
        """
        status = await _read(self._call)
        if self._first != _OF_A_FAILED_WRITE:
            return self._first
        for _ in range(round(WAIT_S / _POLL_S)):
            if status != _OF_A_FAILED_WRITE:
                break
            await asyncio.sleep(_POLL_S)
            status = await _read(self._call)
        return status

    def _keep(self, call: Any) -> None:
        self._first = _result(_read(call))


async def _read(call: Any) -> CodeAndDetails:
    """Returns a call's status; does not wait if it has one."""
    return await call.code(), await call.details()


def _result(coroutine: Coroutine[Any, Any, CodeAndDetails]) -> CodeAndDetails:
    """Runs a coroutine that does not wait.

    A task would run too late: a write that failed is next in line to overwrite the status.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is untyped
    raise RuntimeError("the call has no status yet")
