"""Memory that threads have freed is there for other threads."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, threading
from services.processes.allocator import share_arenas
if {shares}:
    share_arenas()
libc = ctypes.CDLL(None)
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(12)
def allocate():
    libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, libc.fdopen(1, b"w"))
libc.fflush(None)
"""


def num_arenas(*, shares: bool) -> int:
    """Returns how many arenas 12 threads have that run at the same time."""
    program = PROGRAM.format(shares=shares)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_share_two_arenas():
    assert num_arenas(shares=False) > 2
    assert num_arenas(shares=True) <= 2
