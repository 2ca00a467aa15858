"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent dies, whatever either is doing.

    Args:
        parent: the number of the process that forked this one. Linux says nothing of a parent that
            was dead before it was asked: then this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
