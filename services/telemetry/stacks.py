"""Where a process hangs: the stacks of its threads, on standard error."""

import asyncio
import faulthandler
import signal
import sys
from typing import NoReturn

STACKS_SIGNAL = signal.SIGUSR1
"""Makes any process of ours show its stacks, whatever it is doing."""
STALL_LIMIT_S = 5.0
"""Time after which a blocked event loop shows its stacks."""


def show_stacks_on_signal() -> None:
    """Shows the stacks of all threads on STACKS_SIGNAL, and when the process crashes.

    The handler is C code that needs neither the interpreter's lock nor a thread that gets on.
    """
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def show_stacks() -> None:
    """Shows the stacks of all threads now."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


async def watch_event_loop() -> NoReturn:
    """Shows the stacks whenever this event loop has been blocked for STALL_LIMIT_S."""
    try:
        while True:
            faulthandler.dump_traceback_later(STALL_LIMIT_S)
            await asyncio.sleep(STALL_LIMIT_S / 5)
    finally:
        faulthandler.cancel_dump_traceback_later()
