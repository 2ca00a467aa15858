"""Runs a module of ours in a process that ends when the one that started it ends.

python -P -m services.processes.child PARENT_PID MODULE [ARGUMENT ...]
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

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


def python_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the command line that runs a module.

    Python puts the current folder first on its search path, where a `models.py` or a
    `structlog.py` would replace the real module. -P keeps it from doing that.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the command line that runs a module in a child of this process.

    On Linux the child is killed when this process ends, however that happens. Start it from a
    thread that lasts as long as this process: Linux takes the end of that thread for the end of
    the parent.
    """
    return python_command("services.processes.child", [str(os.getpid()), module, *arguments])


def main() -> None:
    """Ties this process to its parent, then becomes the module's program."""
    parent, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    # Compilers start processes of their own, which must not import from the current folder either.
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
