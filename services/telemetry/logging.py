"""Log lines: structlog, as JSON for machines or in colour for people."""

import io
import logging
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO

import structlog

from services.processes.standard_error import LossyStream
from services.processes.terminal_text import terminal_text
from services.telemetry.tracebacks import traceback_without_messages, write_without_messages

LogFormat = Literal["auto", "console", "json"]


def configure_logging(
    *,
    service: str,
    level: str = "info",
    log_format: LogFormat = "auto",
    error_messages: bool = True,
    rank: int | None = None,
) -> None:
    """Makes structlog and the standard library write one kind of line to standard error.

    Args:
        service: value of the key `service` in every line.
        level: least severe level that is written, such as "info".
        log_format: "auto" means console on a terminal and json elsewhere.
        error_messages: whether tracebacks show what errors say, and lines of libraries what they
            fill in; not in processes that hold prompts.
        rank: value of the key `rank`, in one of several processes that share a model.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_facts({"service": service} | ({} if rank is None else {"rank": rank})),
    ]
    renderer: structlog.typing.Processor
    if is_console:
        # The default formatter shows local variables in tracebacks, and with them prompts.
        shared.append(_escape_values)
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=_write_escaped_traceback
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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    if isinstance(sys.stderr, LossyStream):
        sys.stderr.describe_drop = _describe_drop([*shared, renderer])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared if error_messages else [_leave_out_message, *shared],
            use_get_message=error_messages,
            pass_foreign_args=not error_messages,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


def _describe_drop(processors: Sequence[structlog.typing.Processor]) -> Callable[[int], str]:
    """Returns a function that renders the line about dropped ones, without a logger's locks."""

    def describe(num_lines: int) -> str:
        event: Any = {"event": "log_lines_dropped", "num_lines": num_lines}
        for process in processors:
            event = process(None, "warning", event)
        return str(event)

    return describe


def _leave_out_message(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Keeps from a library's line where it is from, and its text without what it fills in.

    Libraries log what they cannot read: gRPC a header's value, with the key in it, asyncio the
    arguments of a callback. A text that nothing is filled in may be complete already.
    """
    del logger, method
    record: logging.LogRecord = event["_record"]
    if not event.pop("positional_args", None):
        event["event"] = "library_logged"
    event.update(logger=record.name, place=f"{record.filename}:{record.lineno}")
    return event


def _escape_values(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Writes what a terminal would obey as escapes; JSON does so by itself."""
    del logger, method
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = terminal_text(value)
    return event


def _write_escaped_traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    written = io.StringIO()
    structlog.dev.plain_traceback(written, exc_info)
    lines = terminal_text(written.getvalue(), keeps_lines=True)
    stream.write(textwrap.indent(lines, "  "))  # a message's second line must not look like ours


def _add_facts(facts: Mapping[str, object]) -> structlog.typing.Processor:
    """Returns a processor that names the process."""

    def add(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        del logger, method
        event.update(facts)
        return event

    return add
