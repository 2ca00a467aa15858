"""Signals before and while a service handles them."""

import os
import signal
import subprocess
import sys

import pytest

from services.processes.stop_signals import end_quietly_on_interrupt, stop_signals


@pytest.fixture
def handlers():
    """Restores what a test changes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("before", "after"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_an_interrupt_of_a_start_shows_no_traceback(handlers, before, after):
    signal.signal(signal.SIGINT, before)
    end_quietly_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is after


def test_sighup_stops_a_service_unless_nohup_started_it(handlers):
    assert signal.SIGHUP in stop_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()


@pytest.mark.parametrize(
    ("module", "imported_early"),
    [
        ("services.engine", "uvloop"),
        ("services.frontend", "structlog"),
        ("services.client", "typer"),
    ],
)
def test_an_interrupt_of_the_first_imports_shows_no_traceback(module, imported_early, tmp_path):
    interrupting = f"import os, signal\nos.kill(os.getpid(), {signal.SIGINT:d})\n"
    (tmp_path / f"{imported_early}.py").write_text(interrupting)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")
