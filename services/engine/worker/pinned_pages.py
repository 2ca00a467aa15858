"""Whole pages of the host's memory, pinned for copies by DMA where the system lets them be.

PyTorch's own allocator of pinned memory rounds sizes up to powers of two. The driver is called
through ctypes: the runtime that PyTorch calls would keep an error for the next kernel's launch.
Source: CUDA driver API, section "Memory Management".
"""

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_DRIVER = "libcuda.so.1"
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every device of this process."""


class PinnedPages:
    """Pages that are unpinned when they are freed, at the latest when this object is gone."""

    def __init__(self, num_bytes: int) -> None:
        """Takes the pages and pins them.

        Args:
            num_bytes: at least 1.

        Raises:
            MemoryError: the system refuses as many pages.
        """
        try:
            pages = mmap.mmap(-1, num_bytes, flags=_PRIVATE)
        except OSError as error:
            raise MemoryError(
                f"the system refuses {num_bytes / 2**30:.2f} GiB of the host's memory: "
                f"{error.strerror}"
            ) from error
        with contextlib.suppress(
            OSError
        ):  # Large pages are pinned sooner; not all systems have them.
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Tensor = torch.frombuffer(pages, dtype=torch.uint8)
        """[num_bytes] uint8, zeros; gone after `free`."""
        address = ctypes.c_void_p(self.memory.data_ptr())
        driver = ctypes.CDLL(_DRIVER)
        torch.cuda.synchronize()  # Makes the device's context this thread's.
        self.status: int = driver.cuMemHostRegister_v2(
            address, ctypes.c_size_t(num_bytes), _PORTABLE
        )
        """CUresult: 0 if the pages are pinned."""
        self._unpin: Callable[[], object] = lambda: None
        if not self.status:
            unpin = weakref.finalize(self, _unpin, driver, address)
            unpin.atexit = False
            self._unpin = unpin

    def free(self) -> None:
        """Unpins the pages, after all copies that are under way, and gives them back."""
        self._unpin()
        self.memory = self.memory.new_empty(0)


def _unpin(driver: ctypes.CDLL, address: ctypes.c_void_p) -> None:
    torch.cuda.synchronize()
    driver.cuMemHostUnregister(address)
