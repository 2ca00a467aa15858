"""The environment variables of a worker process."""

import os
import stat
from pathlib import Path

import structlog

from services.engine.config.engine_config import EngineConfig
from services.processes.private_folder import ExposedFolderError, make_private, private_path

log = structlog.get_logger()

CODE_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "PYTORCH_KERNEL_CACHE_PATH": "torch",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
"""Variable that names a library's folder of compiled code -> our folder in `code_dir`."""

MPS_FOLDER = Path("/tmp/nvidia-mps")
"""Where CUDA looks for an MPS server, whether or not one was asked for."""
_MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"

_IMPORT_ROOT = Path(__file__).resolve().parents[3]


def worker_environment(config: EngineConfig, interface: str, temporary: Path) -> dict[str, str]:
    """Returns a worker's environment: ours, our import root first, folders, threads, a log level.

    OpenMP and MKL read their count when torch is imported, before any configuration is.

    Args:
        config: the engine's.
        interface: the network interface on which ranks talk; loopback on a single host.
        temporary: private folder for the sockets and temporary files of this host's ranks.

    Raises:
        ExposedFolderError: another user can change code that the worker would load.
    """
    search_path = [str(_IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = str(config.worker.num_threads)
    return {
        # torch's profiler would write to standard error, between the lines of the log.
        "KINETO_LOG_LEVEL": "6",
        # Triton 3.9 warns where this is unset, as the next release turns it off.
        "TRITON_DEFAULT_FP_FUSION": "1",
        # The ranks' connections need not be open to other networks.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # this name, and not all that begin with it
        **os.environ,
        **code_variables(config, temporary),
        **mps_variable(temporary),
        # torch gives its sockets names that other users can guess.
        "TMPDIR": str(temporary),
        # Multicast objects can put a host's GPUs out of service, for other programs too.
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PYTHONPATH": os.pathsep.join(search_path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


def code_variables(config: EngineConfig, temporary: Path) -> dict[str, str]:
    """Returns the variables of CODE_FOLDERS, whose private folders it makes.

    A folder that the environment names gets a private folder inside it. Where none can be made,
    compiled code goes to `temporary` and is not kept.

    Raises:
        ExposedFolderError: another user can change one.
    """
    folders = {}
    for name, kind in CODE_FOLDERS.items():
        given = os.environ.get(name)
        folder = private_path(Path(given)) if given else config.compilation.code_dir / kind
        try:
            make_private(folder)
        except ExposedFolderError as error:
            source = name if given else "--compile-cache-dir"
            raise ExposedFolderError(f"{source}: {error}") from None
        except OSError as error:
            log.warning("compiled_code_not_kept", folder=str(folder), error=str(error))
            folder = temporary / kind
        folders[name] = str(folder)
    return folders


def mps_variable(temporary: Path) -> dict[str, str]:
    """Returns the variable that names the folder of CUDA's MPS server.

    It is the one that the environment names, or else CUDA's default if root or we made it. Any
    other user can make the default and serve there; CUDA then gets a folder without a server.
    """
    given = os.environ.get(_MPS_VARIABLE)
    if given:
        return {_MPS_VARIABLE: given}
    try:
        found = MPS_FOLDER.lstat()
    except OSError:
        return {_MPS_VARIABLE: str(temporary / "mps")}
    if stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid()):
        return {_MPS_VARIABLE: str(MPS_FOLDER)}
    log.warning("mps_not_used", folder=str(MPS_FOLDER), uid=found.st_uid)
    return {_MPS_VARIABLE: str(temporary / "mps")}
