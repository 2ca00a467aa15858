"""Facts that compiled pieces depend on.

They are settings, the model, sources, compiler passes, the device, versions and the environment.
`key_fields` lists the settings among them.
"""

import enum
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig
from models.config_sections.families import FAMILIES_WITH_LOCAL_DRAFTS
from models.eagle3_config import Eagle3Config, is_eagle3
from services.engine.compilation.cache.key_fields import (
    CODE_VARIABLES,
    IRRELEVANT_FLAGS,
    IRRELEVANT_MODEL_FIELDS,
    IRRELEVANT_SOURCES,
)
from services.engine.config.checkpoint import REPOSITORY
from services.engine.config.engine_config import EngineConfig

_SOURCE_FOLDERS = ("models", "services/engine/compilation")


@dataclass(frozen=True, slots=True)
class Factors:
    """Named facts, as strings, that compiled pieces depend on."""

    values: Mapping[str, str]

    @property
    def key(self) -> str:
        """A digest of all facts."""
        return digest(json.dumps(self.values, sort_keys=True))

    def differences(self, other: "Factors") -> list[str]:
        """Returns the sorted names of the facts that differ."""
        names = self.values.keys() | other.values.keys()
        return sorted(n for n in names if self.values.get(n) != other.values.get(n))


def digest(text: str) -> str:
    """Returns a text's SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def compute_factors(
    config: EngineConfig, model: ModelConfig, device: torch.device, *, rank: int = 0
) -> Factors:
    """Returns the facts that this process's compiled pieces depend on.

    Args:
        config: the engine's.
        model: the configuration of its model.
        device: runs the pieces.
        rank: the process's, of all that share the model.
    """
    # The compiler takes 2 s to import, which a start with a kept trace must not wait for.
    import torch._functorch.config
    import torch._inductor.config

    from services.engine.compilation.passes.selection import selected_passes

    passes = {each.name: each.uuid for each in selected_passes(config.compilation)}
    facts: dict[str, Any] = {}
    facts |= _prefixed("pass", passes)
    facts |= _prefixed("inductor", torch._inductor.config.save_config_portable())
    facts |= _prefixed("functorch", torch._functorch.config.save_config_portable())
    texts = {name: _text(value) for name, value in facts.items()}
    return Factors({**texts, **trace_factors(config, model, device, rank=rank).values})


def trace_factors(
    config: EngineConfig, model: ModelConfig, device: torch.device, *, rank: int = 0
) -> Factors:
    """Returns the facts that a trace depends on: all but the compiler's own settings.

    The sources of passes are among its source files. Arguments are those of `compute_factors`.
    """
    facts: dict[str, Any] = {"rank": rank, "aux_layers": _aux_layers(config, model)}
    facts |= _prefixed("engine", _flag_facts(config, device))
    facts |= _prefixed("model", _model_facts(model))
    facts |= _prefixed("source", _own_digests())
    facts |= _prefixed("device", _device_facts(device))
    facts |= _prefixed("torch", _torch_facts())
    facts |= _prefixed("environment", {name: os.environ.get(name) for name in CODE_VARIABLES})
    return Factors({name: _text(value) for name, value in facts.items()})


def source_digests(paths: Iterable[Path]) -> dict[str, str]:
    """Returns the digest of each source file, by its path in the tree."""
    return {
        path.relative_to(REPOSITORY).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
    }


@cache
def _own_digests() -> dict[str, str]:
    """Returns the digests of this process's sources, which it has loaded."""
    return source_digests(_sources())


def _sources() -> list[Path]:
    """Returns the files that affect tracing, splitting and compiling."""
    left_out = [REPOSITORY / name for name in IRRELEVANT_SOURCES]
    return [
        path
        for name in _SOURCE_FOLDERS
        for path in (REPOSITORY / name).rglob("*.py")
        if not any(path.is_relative_to(each) for each in left_out)
    ]


def _aux_layers(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """Returns the layers whose outputs an EAGLE-3 head or draft layers read, if any."""
    if config.speculation.num_layer_drafts and model.architecture in FAMILIES_WITH_LOCAL_DRAFTS:
        return (model.num_hidden_layers - 1,)
    folder = config.speculation.draft_model
    if folder is None or not is_eagle3(folder):
        return ()
    return Eagle3Config.from_folder(folder, model).aux_layers


def _flag_facts(config: EngineConfig, device: torch.device) -> dict[str, Any]:
    """Returns the flags that pieces depend on, and the level after --enforce-eager."""
    flags = {**config.flags(), "compilation_level": config.compilation.level_on(device.type)}
    return {flag: flags[flag] for flag in flags if flag not in IRRELEVANT_FLAGS}


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    facts = asdict(config)
    return {name: facts[name] for name in facts if name not in IRRELEVANT_MODEL_FIELDS}


def _prefixed(prefix: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in facts.items()}


def _device_facts(device: torch.device) -> dict[str, Any]:
    """Returns the device properties that generated code depends on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
    return {
        "type": device.type,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _torch_facts() -> dict[str, Any]:
    facts = {
        "version": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if torch.cuda.is_available():
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch
    return facts


def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _text(value: Any) -> str:
    """Formats a value identically in every process: no addresses, sets sorted."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        items = sorted((str(key), _text(each)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {text}" for key, text in items) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_text(each) for each in value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    if isinstance(value, (str, int, float, bool, type(None), Path)):
        return repr(value)
    return f"{type(value).__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
