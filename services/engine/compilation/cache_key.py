"""What compiled pieces depend on, and what they do not.

Every field of both configurations takes part unless a table below says why it need not.
"""

import enum
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config

from models.config import ModelConfig
from services.engine.compilation_config import CompilationConfig
from services.engine.config import REPOSITORY, EngineConfig

_COMPILATION_FLAG = "takes part as a field of CompilationConfig"
_GRAPHS = "graphs are captured around pieces, which stay the same"
_PLACE = "only says where to write"
_SERVICE = "concerns the service, not the model"
_TABLE_SIZE = "pieces see query tokens only, and any number of them"

IRRELEVANT_COMPILATION_FIELDS = {
    "cudagraph_mode": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "cudagraph_piece_sizes": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "cudagraph_copy_inputs": "inputs are copied before the pieces run",
    "compile_sizes": "each size has an artifact of its own",
    "debug_dump_path": _PLACE,
    "cache_dir": _PLACE,
}
"""Field of CompilationConfig -> why no compiled piece depends on it."""

IRRELEVANT_ENGINE_FIELDS = {
    "model": "what config.json says takes part; weights are inputs of the pieces",
    "served_model_name": _SERVICE,
    "host": _SERVICE,
    "port": _SERVICE,
    "device": "the device itself takes part",
    "kv_cache_dtype": "attention, which reads the cache, is never compiled",
    "load_format": "weights are inputs of the pieces",
    "max_model_len": _TABLE_SIZE,
    "block_size": _TABLE_SIZE,
    "num_kv_blocks": _TABLE_SIZE,
    "kv_cache_memory_mb": _TABLE_SIZE,
    "gpu_memory_utilization": _TABLE_SIZE,
    "max_num_seqs": _TABLE_SIZE,
    "max_num_batched_tokens": _TABLE_SIZE,
    "max_num_waiting": _SERVICE,
    "enable_prefix_caching": _SERVICE,
    "enforce_eager": "nothing is compiled then",
    "compilation_level": _COMPILATION_FLAG,
    "cudagraph_mode": _COMPILATION_FLAG,
    "cudagraph_capture_sizes": _COMPILATION_FLAG,
    "cudagraph_piece_sizes": _COMPILATION_FLAG,
    "cuda_graph_sizes": _COMPILATION_FLAG,
    "cudagraph_copy_inputs": _COMPILATION_FLAG,
    "splitting_ops": _COMPILATION_FLAG,
    "use_inductor": _COMPILATION_FLAG,
    "compile_sizes": _COMPILATION_FLAG,
    "inductor_compile_config": _COMPILATION_FLAG,
    "debug_dump_path": _COMPILATION_FLAG,
    "compile_cache_dir": _COMPILATION_FLAG,
    "histogram_dir": _SERVICE,
    "heartbeat_interval_ms": _SERVICE,
    "step_timeout_s": _SERVICE,
    "worker_start_timeout_s": _SERVICE,
    "drain_timeout_s": _SERVICE,
    "credit_window": _SERVICE,
    "slow_reader_timeout_s": _SERVICE,
    "max_sessions": _SERVICE,
    "max_message_bytes": _SERVICE,
    "allow_watch_tokens": _SERVICE,
    "capture_while_serving": _GRAPHS,
    "fail_on_late_build": _SERVICE,
    "log_level": _SERVICE,
    "log_format": _SERVICE,
}
"""Field of EngineConfig -> why no compiled piece depends on it."""

_SOURCE_FOLDERS = ("models", "services/engine/compilation")


@dataclass(frozen=True, slots=True)
class Factors:
    """Named facts, as strings, that compiled pieces depend on."""

    values: Mapping[str, str]

    @property
    def key(self) -> str:
        """A digest of all of them."""
        return digest(json.dumps(self.values, sort_keys=True))

    def differences(self, other: "Factors") -> list[str]:
        """Returns the names of facts that are not the same in both, sorted."""
        names = self.values.keys() | other.values.keys()
        return sorted(n for n in names if self.values.get(n) != other.values.get(n))


def digest(text: str) -> str:
    """Returns a text's SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def compute_factors(
    config: CompilationConfig, engine: EngineConfig, device: torch.device
) -> Factors:
    """Returns everything that the pieces compiled by this process depend on.

    Args:
        config: made from `engine` for this device.
        engine: the engine's flags; its model folder must have a config.json.
        device: where the pieces run.
    """
    facts: dict[str, Any] = {}
    facts |= _fields("compilation", config, IRRELEVANT_COMPILATION_FIELDS)
    facts |= _fields("engine", engine, IRRELEVANT_ENGINE_FIELDS)
    facts |= _prefixed("model", asdict(ModelConfig.from_folder(engine.model)))
    facts |= _prefixed("source", source_digests(_sources()))
    facts |= _prefixed("device", _device_facts(device))
    facts |= _prefixed("torch", _torch_facts())
    facts |= _prefixed("inductor", torch._inductor.config.save_config_portable())
    facts |= _prefixed("functorch", torch._functorch.config.save_config_portable())
    return Factors({name: _text(value) for name, value in facts.items()})


def source_digests(paths: Iterable[Path]) -> dict[str, str]:
    """Returns the digest of each source file's text, by its path in the tree."""
    return {
        path.relative_to(REPOSITORY).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
    }


def _sources() -> list[Path]:
    """Returns the files that a model's code or the way it is compiled can come from."""
    return [path for name in _SOURCE_FOLDERS for path in (REPOSITORY / name).rglob("*.py")]


def _fields(
    prefix: str, config: CompilationConfig | EngineConfig, irrelevant: Mapping[str, str]
) -> dict[str, Any]:
    """Returns a configuration's fields that are not listed as irrelevant."""
    names = [name for name in type(config).model_fields if name not in irrelevant]
    return _prefixed(prefix, {name: getattr(config, name) for name in names})


def _prefixed(prefix: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in facts.items()}


def _device_facts(device: torch.device) -> dict[str, Any]:
    """Returns the properties of a device that code is generated for."""
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
    """Returns the versions of what generates and runs code."""
    facts = {
        "version": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if torch.cuda.is_available():
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch
    return facts


def _text(value: Any) -> str:
    """Writes a value the same way in every process: no addresses, no order of a set."""
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
