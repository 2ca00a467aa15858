"""Signals that end a service in good order."""

import signal


def end_quietly_on_interrupt() -> None:
    """Lets SIGINT end the process as SIGTERM does, without a traceback, until it is handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals to stop on: SIGTERM, SIGINT, and SIGHUP of a terminal that is closed.

    A process that `nohup` started ignores SIGHUP, and goes on doing so.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
