"""Format of log lines, and content that they never have."""

import asyncio
import gc
import io
import json
import logging
import os
import sys

import pytest
import structlog

from services.processes.standard_error import LossyStream, num_dropped_lines
from services.telemetry.logging import configure_logging
from services.telemetry.tracebacks import log_loop_errors
from tests.support.restored_logging import restored_logging


@pytest.fixture(autouse=True)
def _restored():
    with restored_logging():
        yield


def test_a_json_line_has_event_service_level_and_facts(capsys):
    configure_logging(service="engine", log_format="json")
    structlog.get_logger().info("thing_happened", duration_ms=1.5)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "thing_happened",
        "service": "engine",
        "level": "info",
        "duration_ms": 1.5,
    }


def test_lines_below_the_level_are_not_written(capsys):
    configure_logging(service="engine", level="warning", log_format="json")
    structlog.get_logger().info("thing_happened")
    assert capsys.readouterr().err == ""


def test_the_standard_library_writes_the_same_kind_of_line(capsys):
    configure_logging(service="engine", log_format="json")
    logging.getLogger("grpc").error("broken %s", "pipe")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["service"]) == ("broken pipe", "engine")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_service_that_holds_prompts_shows_no_text_that_a_library_fills_in(capsys, log_format):
    configure_logging(service="frontend", log_format=log_format, error_messages=False)
    logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        bytes([0xA0]).decode()
    except UnicodeDecodeError:
        logger.exception("Invalid encoding on %s", b"Bearer alice-0123456789\xa0")
    logger.error("Invalid encoding on Bearer alice-0123456789")
    written = capsys.readouterr().err
    assert "alice" not in written
    assert "Invalid encoding on %s" in written
    assert "UnicodeDecodeError" in written
    assert "library_logged" in written
    assert "test_logging.py:" in written
    assert "grpc._cython.cygrpc" in written


@pytest.mark.parametrize("error_messages", [False, True])
def test_a_console_line_has_nothing_that_a_terminal_obeys(capsys, error_messages):
    configure_logging(service="engine", log_format="console", error_messages=error_messages)
    text = "\x1b]0;PWNED\x07\x1b[2J\r\nforged\u202e\x9b31m"
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id=text):
        log.info("thing_happened", frontend=text, names=[text])
        logging.getLogger(text).error("thing %s", text)
    log.error("thing_failed", exc_info=ValueError(text))
    written = capsys.readouterr().err
    assert r"\x1b]0;PWNED\x07\x1b[2J\r\nforged\u202e\x9b31m" in written
    assert not [line for line in written.splitlines() if line.startswith("forged")]
    assert set(written) & set("\x07\x1b\r\u202e\x9b") == set()


def test_a_line_is_written_at_once(monkeypatch):
    """Else another process that writes to the same file gets between a line and its end."""
    written = []

    class Stream(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    configure_logging(service="engine", log_format="json")
    structlog.get_logger().info("thing_happened")
    logging.getLogger("grpc").error("broken")
    assert [text.count("\n") for text in written] == [1, 1]
    assert all(text.endswith("}\n") for text in written)


def test_unread_lines_are_dropped_and_a_line_says_how_many(monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = LossyStream(writing, max_pending_bytes=1000)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(service="engine", log_format="json")
    for number in range(2000):
        structlog.get_logger().info("thing_happened", number=number)
    assert num_dropped_lines() > 0
    content = b""
    while b"log_lines_dropped" not in content or not content.endswith(b"\n"):
        content += os.read(reading, 2**16)
    *_, last = map(json.loads, content.splitlines())
    assert last.pop("timestamp").endswith("Z")
    assert last == {
        "event": "log_lines_dropped",
        "service": "engine",
        "level": "warning",
        "num_lines": num_dropped_lines(),
    }
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables(capsys, log_format):
    configure_logging(service="engine", log_format=log_format)

    def fail(prompt):
        raise KeyError("broken")

    try:
        fail("once upon " + "a time")
    except KeyError as error:
        structlog.get_logger().error("thing_failed", exc_info=error)
    written = capsys.readouterr().err
    assert "KeyError" in written
    assert "once upon a time" not in written


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("make_logger", [structlog.get_logger, logging.getLogger])
def test_a_service_that_holds_prompts_shows_no_message_of_an_error(capsys, log_format, make_logger):
    configure_logging(service="frontend", log_format=log_format, error_messages=False)
    prompt = "once upon " + "a time"

    def look_up():
        return {}[prompt]

    def fail():
        try:
            look_up()
        except KeyError as error:
            raise ExceptionGroup(prompt, [ValueError(prompt)]) from error

    try:
        fail()
    except ExceptionGroup as error:
        make_logger().error("thing_failed", exc_info=error)
    written = capsys.readouterr().err
    for named in ("KeyError", "ExceptionGroup", "ValueError", "in look_up", "in fail"):
        assert named in written
    assert written.index("KeyError") < written.index("ExceptionGroup")
    assert prompt not in written


async def test_an_error_that_was_not_awaited_is_logged_without_its_message(capsys):
    gc.collect()  # the tasks of earlier tests
    configure_logging(service="frontend", log_format="json", error_messages=False)
    loop = asyncio.get_running_loop()
    log_loop_errors()
    prompt = "once upon " + "a time"

    async def fail():
        raise ValueError(prompt)

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    loop.call_soon({}.__getitem__, prompt)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    written = capsys.readouterr().err
    assert "in fail" in written
    assert written.count("event_loop_failed") == 2
    assert prompt not in written
