"""Logging as it was, after a test in whose process something configures it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def restored_logging() -> Iterator[None]:
    """Puts the configuration of both logging libraries back: later tests read logs, too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)
