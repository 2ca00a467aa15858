"""Processes of pytest-xdist share a machine: each has one CPU thread, and begins at another GPU.

With PyTorch's default, every process has a thread for each core: 28 processes on 32 cores then took
16 minutes, and with one thread each 5 (two H200, 2026-11). 15 processes that kept the memory they
had freed took 73 GB of an H100's 80, and tests of whole engines found none.
"""

import os
from pathlib import Path

import pytest

_MOST_KEPT_BYTES = 2**30
_GPUS = Path("/proc/driver/nvidia/gpus")

worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker:  # before anything imports torch
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, "1")
    num_gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 1
    first = int(worker.removeprefix("gw"))
    gpus = [str((first + number) % num_gpus) for number in range(num_gpus)]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpus))


@pytest.fixture(autouse=True)
def _gives_memory_back():
    """Leaves the memory of a large test to those beside it, whose processes share the GPU."""
    yield
    import torch  # after the environment is set

    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _MOST_KEPT_BYTES:
        torch.cuda.empty_cache()
