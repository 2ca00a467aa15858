"""Time that passes when a test says so."""

import time

import pytest


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Puts the monotonic clock forward, and with it the timers of event loops."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)
