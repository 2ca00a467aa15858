"""Entry point of a worker process; the engine service starts it.

python -m services.engine.worker --socket-fd 5 --rank 0 --config '{"model": "..."}'
"""

import argparse
import ctypes
import gc
import signal
import socket
import sys
import threading

from services.engine.config.engine_config import EngineConfig
from services.engine.patch_memory import PatchMemory
from services.engine.worker.meeting import Meeting
from services.engine.worker.placement import rank_places
from services.engine.worker.wire import Channel
from services.processes.standard_error import replace_standard_error
from services.telemetry.logging import configure_logging
from services.telemetry.stacks import show_stacks_on_signal

_DRIVER = "libcuda.so.1"


def main() -> int:
    """Runs the worker and returns its exit code."""
    # The service drains first and ends its worker itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    show_stacks_on_signal()
    parser = argparse.ArgumentParser(prog="services.engine.worker")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--meeting-fd", type=int, help="where ranks meet; see Meeting")
    parser.add_argument("--meeting-address", default="", help="as above")
    parser.add_argument("--patches-fd", type=int, help="memory for patches; see PatchMemory")
    parser.add_argument("--config", type=EngineConfig.model_validate_json, required=True)
    arguments = parser.parse_args()
    config: EngineConfig = arguments.config
    configure_logging(
        service="engine-worker",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
        rank=arguments.rank if config.parallel.num_ranks > 1 else None,
    )
    place = rank_places(config.parallel)[arguments.rank]
    opening = begin_to_open(config.worker.device, place.device)
    # Importing torch takes seconds, in which Ctrl-C must already be ignored. Searches for garbage
    # would take an eighth of them, and the first one afterwards 0.2 s: modules stay for good.
    gc.disable()
    from services.engine.worker.process import run_worker

    gc.freeze()
    gc.enable()
    # No thread may be about when the worker forks.
    if opening is not None:
        opening.join()
    channel = Channel(_adopt(arguments.socket_fd))
    try:
        meeting = Meeting(fd=arguments.meeting_fd, address=arguments.meeting_address)
        patches = None if arguments.patches_fd is None else PatchMemory(arguments.patches_fd)
        return run_worker(config, channel, place=place, meeting=meeting, patches=patches)
    finally:
        channel.close()


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


def _adopt(fd: int) -> socket.socket:
    """Makes an inherited descriptor ours: a low number, which select() needs, not passed on."""
    inherited = socket.socket(fileno=fd)
    with inherited:
        return inherited.dup()


if __name__ == "__main__":
    replace_standard_error()
    sys.exit(main())
