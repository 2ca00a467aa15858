"""Command-line flags of all benchmarks of a whole engine.

Flags that a benchmark does not know are the engine's: `--device cpu --compilation-level 3`.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from models.config import ConfigError, ModelConfig
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import read_flags
from services.telemetry.logging import configure_logging
from tests.bench.model_folder import make_model_folder, shape_names

PEER_SETTINGS: dict[str, object] = {
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 16384,
    "max_num_mixed_tokens": 16384,
    "gpu_memory_utilization": 0.85,
    "log_level": "warning",
}
"""How the peer was measured; a flag overrides each."""

PLACES = ("model", "served_model_name", "host", "port", "compile_cache_dir", "debug_dump_path")
"""Settings that do not belong in a comparison: where things are."""

LONGEST = 8448
"""Tokens of one request, unless --max-model-len says otherwise: prompts of 8192 and some output."""


class Budget:
    """The time by which a benchmark has to end."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when there are none."""
        return max(0.0, self._end_s - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A benchmark's command line, read."""

    arguments: argparse.Namespace
    config: EngineConfig
    model: ModelConfig
    shape: str
    budget: Budget

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.config.checkpoint.max_model_len or self.model.max_position_embeddings

    def engine_settings(self) -> dict[str, object]:
        """Returns all settings of the engine but paths and addresses, as JSON holds them.

        And by how much lengths were divided, for then nothing is comparable with anything else.
        """
        sections = json.loads(self.config.model_dump_json())
        settings = {
            name: value
            for section in sections.values()
            for name, value in section.items()
            if name not in PLACES
        }
        return settings | {"divide_by": getattr(self.arguments, "divide_by", 1)}


def make_parser(doc: str, *, budget_s: float = 540) -> argparse.ArgumentParser:
    """Returns a parser with the common flags."""
    parser = argparse.ArgumentParser(
        description=doc.partition("\n")[0], epilog="Other flags are the engine's."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=shape_names(), help="random weights of this shape")
    model.add_argument("--model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--num-layers", type=int, help="with --shape: number of layers to keep")
    parser.add_argument("--out", type=Path, help="write the result to this file as JSON")
    parser.add_argument("--commit", default="", help="commit to name where there is no git")
    parser.add_argument("--budget-s", type=float, default=budget_s, help="time for everything")
    return parser


def read_settings(
    parser: argparse.ArgumentParser,
    folder: Path,
    *,
    defaults: Mapping[str, object] = PEER_SETTINGS,
) -> Settings:
    """Reads the command line; ends the program when it makes no sense.

    Args:
        parser: from make_parser, with the benchmark's own flags.
        folder: gets the model's folder for a shape; must live as long as the engine.
        defaults: settings of the engine, which flags override.
    """
    arguments, engine_flags = parser.parse_known_args()
    if arguments.out is not None and not arguments.out.resolve().parent.is_dir():
        parser.error(f"--out: there is no folder {arguments.out.resolve().parent}")
    if arguments.num_layers is not None and not arguments.shape:
        parser.error("--num-layers: a checkpoint has the layers that it has")
    try:
        return _settings(arguments, engine_flags, folder, defaults)
    except ValidationError as error:
        problems = [f"{each['loc']}: {each['msg']} ({each['input']!r})" for each in error.errors()]
        parser.error("; ".join(problems))
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def list_of_numbers(text: str) -> list[int]:
    """Reads "1,8,32"."""
    return [int(part) for part in text.split(",") if part]


def list_of_pairs(text: str) -> list[tuple[int, int]]:
    """Reads "8x12000,1x32000"."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return [(int(first), int(second)) for first, second in pairs]


def list_of(*names: str) -> Callable[[str], list[str]]:
    """Returns a reader of lists such as "decode,serving" that refuses other names."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= {*names}:
            raise argparse.ArgumentTypeError(f"{text!r}; it takes {', '.join(names)}")
        return chosen

    return read


def _settings(
    arguments: argparse.Namespace,
    engine_flags: list[str],
    folder: Path,
    defaults: Mapping[str, object],
) -> Settings:
    given = read_flags(EngineConfig, engine_flags)
    asked = {
        flag: getattr(getattr(given, section), flag)
        for section in given.sections()
        for flag in getattr(given, section).model_fields_set
    }
    num_layers = arguments.num_layers
    path = arguments.model or make_model_folder(arguments.shape, folder, num_layers)
    model = ModelConfig.from_folder(path)
    longest = int(str(defaults.get("max_model_len", LONGEST)))
    values = {
        **defaults,
        "max_model_len": min(longest, model.max_position_embeddings),
        "load_format": "safetensors" if arguments.model else "dummy",
        **asked,
        "model": path,
    }
    config = EngineConfig.from_flags(**values)
    configure_logging(
        service="bench",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
    )
    return Settings(
        arguments=arguments,
        config=config,
        model=model,
        # Neither the peer's figures nor the floor are those of several GPUs.
        shape=(arguments.shape or path.resolve().name)
        + (f", {num_layers} layers" if num_layers else "")
        + (f", {config.parallel.num_ranks} ranks" if config.parallel.num_ranks > 1 else ""),
        budget=Budget(arguments.budget_s),
    )
