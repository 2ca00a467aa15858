"""Signals before and while a service handles them."""

import signal

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
