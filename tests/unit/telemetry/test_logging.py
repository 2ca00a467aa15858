"""What log lines look like, and what they never hold."""

import json
import logging
import os
import sys

import pytest
import structlog

from services.telemetry.logging import configure_logging


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


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


def test_a_reader_that_went_away_does_not_hurt(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    # A last flush at interpreter exit would fail too; the descriptor is closed before that.
    with open(writing, "w", buffering=1, closefd=False) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        configure_logging(service="engine", log_format="json")
        structlog.get_logger().info("thing_happened")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


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
