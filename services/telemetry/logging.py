"""Log lines: structlog, as JSON for machines or in colour for people."""

import contextlib
import io
import logging
import sys
from typing import Literal, TextIO, cast

import structlog

from services.telemetry.tracebacks import traceback_without_messages, write_without_messages

LogFormat = Literal["auto", "console", "json"]


def configure_logging(
    *,
    service: str,
    level: str = "info",
    log_format: LogFormat = "auto",
    error_messages: bool = True,
) -> None:
    """Makes structlog and the standard library write one kind of line to standard error.

    Args:
        service: value of the key `service` in every line.
        level: least severe level that is written, such as "info".
        log_format: "auto" means console on a terminal and json elsewhere.
        error_messages: whether tracebacks show what errors say; not in processes that hold prompts.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
    ]
    renderer: structlog.typing.Processor
    if is_console:
        # The default formatter shows local variables in tracebacks, and with them prompts.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback
            if error_messages
            else write_without_messages,
        )
    else:
        shared.append(
            structlog.processors.format_exc_info
            if error_messages
            else structlog.processors.ExceptionRenderer(traceback_without_messages)
        )
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        # It writes a line at once: engine and worker share a stream, and would write between a
        # line and its end.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


class _LossyStream(io.TextIOBase):
    """Writes to another stream, and drops what it does not take.

    A log reader that went away (`octavo engine 2>&1 | head`) must not take the service with it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _add_service(service: str) -> structlog.typing.Processor:
    """Returns a processor that names the service."""

    def add(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        del logger, method
        event["service"] = service
        return event

    return add
