"""Divides this machine's GPUs among the engines that share it."""

import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from services.client.service_flags import read_flags
from services.client.supervisor import ServiceFailedError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_LIST_COMMAND = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_LIST_TIMEOUT_S = 30.0
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Settings whose product is the number of GPUs of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """GPUs that an engine's flags ask for.

    device: where it runs; auto takes a GPU where there is one.
    num_gpus: GPUs that one engine uses together, on this host.
    names_devices: whether the flags choose GPUs by number, the same for each engine.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: int = 1
    names_devices: bool = False


def engine_needs(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> EngineNeeds:
    """Reads an engine's flags and environment.

    Raises:
        ServiceFailedError: a number or the device is malformed.
    """
    numbers = (*_SIZES, "num_nodes")
    found = read_flags(
        arguments,
        "engine",
        device=(str, environ.get("OCTAVO_ENGINE_DEVICE", "auto")),
        devices=(str, environ.get("OCTAVO_ENGINE_DEVICES")),
        **{name: (int, environ.get(f"OCTAVO_ENGINE_{name.upper()}", "1")) for name in numbers},
    )
    sizes = {f"--{name.replace('_', '-')}": getattr(found, name) for name in _SIZES}
    if found.device not in ("auto", "cpu", "cuda") or min(sizes.values()) < 1:
        flags = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ServiceFailedError(
            f"the engine's flags: --device {found.device}, {flags} are not a device and numbers "
            "of GPUs",
            exit_code=2,
        )
    return EngineNeeds(
        device=found.device,
        num_gpus=math.ceil(math.prod(sizes.values()) / max(1, found.num_nodes)),
        names_devices=found.devices is not None,
    )


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that CUDA programs may use, as CUDA_VISIBLE_DEVICES names them, in order.

    Without the variable these are the ids that the driver lists. Nothing is opened on a GPU.

    Raises:
        ServiceFailedError: CUDA_VISIBLE_DEVICES names a GPU twice.
    """
    if (value := environ.get(VISIBLE)) is not None:
        gpus: list[str] = []
        for name in map(str.strip, value.split(",")):
            if not name or name.startswith("-"):  # CUDA ignores what follows
                break
            gpus.append(name)
        if len(set(gpus)) < len(gpus):
            raise ServiceFailedError(f"{VISIBLE}={value} names a GPU twice", exit_code=2)
        return gpus
    try:
        listed = subprocess.run(
            _LIST_COMMAND, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []  # no driver
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def divide_gpus(num_engines: int, needs: EngineNeeds, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Returns for each engine the environment that shows it its own GPUs.

    The GPUs are taken in order, `needs.num_gpus` for each engine. A single engine sees what we
    see, as do engines on a CPU.

    Raises:
        ServiceFailedError: there are too few GPUs, or the flags give all engines the same ones.
    """
    is_on_gpu = needs.device == "cuda" or (needs.device == "auto" and bool(gpus))
    if not is_on_gpu:
        return [{} for _ in range(num_engines)]
    size = needs.num_gpus
    num_needed = num_engines * size
    if num_needed > len(gpus):
        engines = "1 engine needs" if num_engines == 1 else f"{num_engines} engines need"
        each = f", {size} each" if num_engines > 1 else ""
        raise ServiceFailedError(
            f"{engines} {num_needed} GPU{'s' * (num_needed > 1)}{each}, and {len(gpus)} "
            f"{'is' if len(gpus) == 1 else 'are'} visible; "
            "--device=cpu runs on the CPU",
            exit_code=2,
        )
    if num_engines == 1:
        return [{}]
    if needs.names_devices:
        raise ServiceFailedError(
            f"--devices gives all {num_engines} engines the same GPUs; without it each gets its "
            f"own, in the order of {VISIBLE}",
            exit_code=2,
        )
    return [{VISIBLE: ",".join(gpus[first : first + size])} for first in range(0, num_needed, size)]
