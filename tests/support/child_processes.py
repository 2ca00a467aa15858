"""Processes that the process of a test has started."""

import contextlib

import psutil


def children_that_run(module: str) -> list[psutil.Process]:
    """Returns the children that run a module; other tests may have left services running."""
    found = []
    for child in psutil.Process().children():
        # It may have ended since, and then has no command.
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(child)
    return found
