"""Opens the GPU while Python imports what will use it."""

import ctypes
import threading

_DRIVER = "libcuda.so.1"


def begin_to_open(device: str, number: int) -> threading.Thread | None:
    """Makes a GPU's primary context, which torch will find, in a thread; None for a CPU.

    Whatever keeps it from that keeps torch too, which says what it is.

    Args:
        device: as it is configured.
        number: the GPU's.
    """
    if device == "cpu":
        return None
    thread = threading.Thread(target=_open, args=(number,), name="open-gpu", daemon=True)
    thread.start()
    return thread


def _open(number: int) -> None:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
