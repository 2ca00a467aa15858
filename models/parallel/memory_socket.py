"""The socket through which torch hands a process's GPU memory to the other ranks. No torch here."""

import contextlib
import os
from pathlib import Path


def remove_memory_socket(pid: int) -> None:
    """Removes the socket file of a process, which torch leaves if it is killed at that moment.

    A later process with the same number could not make its own. Processes in containers often have
    the same number.

    Source: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.cpp, get_socket_name.

    Args:
        pid: of a process that has ended or has not made its socket yet.
    """
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    folder = next((os.environ[name] for name in names if name in os.environ), "/tmp")
    with contextlib.suppress(OSError):
        Path(folder, f"symm_mem-{pid}").unlink()
