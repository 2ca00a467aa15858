"""The environment variables of a worker process."""

import os
from pathlib import Path

from services.engine.config.engine_config import EngineConfig

_IMPORT_ROOT = Path(__file__).resolve().parents[3]


def worker_environment(config: EngineConfig, interface: str) -> dict[str, str]:
    """Returns a worker's environment: ours, our import root first, a thread count, a log level.

    OpenMP and MKL read their count when torch is imported, before any configuration is.

    Args:
        config: the engine's.
        interface: the network interface on which ranks talk; loopback on a single host.
    """
    search_path = [str(_IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(config.worker.num_threads)
    return {
        # torch's profiler would write to standard error, between the lines of the log.
        "KINETO_LOG_LEVEL": "6",
        # The ranks' connections need not be open to other networks.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # this name, and not all that begin with it
        **os.environ,
        # Multicast objects can put a host's GPUs out of service, for other programs too.
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PYTHONPATH": os.pathsep.join(search_path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
