"""The machine that a benchmark ran on, and the use that its processes make of it."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "grpcio", "protobuf", "numpy", "uvloop", "transformers")


def machine() -> dict[str, object]:
    """Returns names and numbers of the hardware; gpu is None where there is none."""
    lines = _nvidia_smi("name,driver_version").splitlines()
    name, _, driver = (lines[0] if lines else "").partition(", ")
    return {
        "gpu": name or None,
        "num_gpus": len(lines),
        "driver": driver or None,
        "cpu": _cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
    }


def versions() -> dict[str, str]:
    """Returns versions of Python and of the packages that decide speed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Returns the commit, with "-dirty" if files differ; "unknown" outside of git."""
    described = _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    return described or "unknown"


def gpus_used_mib() -> list[int]:
    """Returns the used memory of each GPU, of all processes."""
    return [int(used) for used in _nvidia_smi("memory.used").split()]


def peak_host_mib(pid: int) -> int | None:
    """Returns the most resident memory that a live process has had."""
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1024
    return None


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a live process, user and system, without its children's."""
    # The name in parentheses may hold spaces; fields 14 and 15 of proc(5) are counted from its end.
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children."""
    path = Path("/proc") / str(pid) / "task" / str(pid) / "children"
    return [int(child) for child in path.read_text().split()]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def _nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return _output(command)


def _output(command: list[str]) -> str:
    """Returns what a program prints; nothing when it is not there or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
