"""Tracebacks of services that hold prompts: where an error arose, without what it says.

An error's message may repeat what a caller sent: a KeyError its key, a ValueError its text.
"""

import asyncio
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

import structlog

log = structlog.get_logger()

ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def traceback_without_messages(exc_info: ExcInfo) -> str:
    """Returns an error's frames and type, causes first."""
    error = exc_info[1]
    return "" if error is None else "\n".join(_lines(error, set()))


def write_without_messages(stream: TextIO, exc_info: ExcInfo) -> None:
    """Writes the same where structlog's console renderer wants it."""
    stream.write(f"\n{traceback_without_messages(exc_info)}")


def log_loop_errors() -> None:
    """Lets the event loop log errors that no task awaited; asyncio itself would show messages."""
    asyncio.get_running_loop().set_exception_handler(_log_loop_error)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    del loop
    error = context.get("exception")
    if error is None:
        log.error("event_loop_failed", reason=context["message"])
    else:  # then the message shows the arguments of a callback
        log.error("event_loop_failed", exc_info=error)


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _lines(before, seen)
        yield "which led to:"
    for place in traceback.extract_tb(error.__traceback__):
        yield f'  File "{place.filename}", line {place.lineno}, in {place.name}'
        if place.line:
            yield f"    {place.line}"
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, BaseExceptionGroup):
        for number, each in enumerate(error.exceptions, 1):
            yield f"which holds, number {number}:"
            yield from _lines(each, seen)
