"""Processes of pytest-xdist share a machine: each has one CPU thread (tests/conftest.py), and
begins at another GPU.

With PyTorch's default, every process has a thread for each core: 28 processes on 32 cores then took
16 minutes, and with one thread each 5 (two H200, 2026-11). 15 processes that kept the memory they
had freed took 73 GB of an H100's 80, and tests of whole engines found none. A process whose GPU met
an illegal instruction or address fails whatever it runs next, so it ends there and xdist starts
another.
"""

import os
import sys
from pathlib import Path

import pytest

_MOST_KEPT_BYTES = 2**30
_GPUS = Path("/proc/driver/nvidia/gpus")

worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker:  # before anything imports torch
    num_gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 1
    first = int(worker.removeprefix("gw"))
    gpus = [str((first + number) % num_gpus) for number in range(num_gpus)]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpus))


@pytest.fixture(autouse=True)
def _gives_memory_back():
    """Leaves the memory of a large test to those beside it, whose processes share the GPU."""
    yield
    import torch  # after the environment is set

    if not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()  # an error belongs to the test that caused it
    if torch.cuda.memory_reserved() > _MOST_KEPT_BYTES:
        torch.cuda.empty_cache()


def _has_lost_its_gpu() -> bool:
    """Whether the driver refuses this process everything from here on."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the slow tests of several ranks: xdist gives each worker a row of neighbours."""
    slow = [item for item in items if any(mark.args for mark in item.iter_markers("gpu"))]
    items[:] = [item for item in items if item not in slow]
    spacing = len(items) // (len(slow) + 1) + 1
    for number, item in enumerate(slow):
        items.insert(number * spacing, item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Ends a worker of xdist whose GPU is lost, once its test has been reported."""
    if worker and _has_lost_its_gpu():
        os._exit(1)
