"""Runs the engine service: `python -m services.engine --help`.

Subcommands: `cache explain` lists compiled pieces for the same flags, `replay` runs a recording's
steps again, `graphs plan` proposes capture sizes.
"""

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import uvloop
from pydantic import ValidationError

from models.config import ModelConfig
from services.engine.capture_sizes.choice import with_planned_sizes
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.checkpoint.table_memory import check_table_memory
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import describe_problems, read_flags
from services.processes.allocator import share_arenas
from services.processes.standard_error import replace_standard_error
from services.telemetry.logging import configure_logging

DIFFERENT = 1
USAGE_ERROR = 2

_Config = TypeVar("_Config", bound=EngineConfig)


class _UsageError(Exception):
    """The command cannot be run; the message is for the operator."""


def main() -> int:
    """Runs what the arguments ask for and returns the process's exit status."""
    try:
        match sys.argv[1:]:
            case ["cache", "explain", *arguments]:
                return _explain_cache(arguments)
            case ["replay", *arguments]:
                return _replay(arguments)
            case ["graphs", "plan", *arguments]:
                return _plan_graphs(arguments)
            case arguments:
                return _serve(arguments)
    except _UsageError as error:
        print(f"octavo engine: {error}", file=sys.stderr)  # noqa: T201  logging is not configured yet
        return USAGE_ERROR


def _serve(arguments: Sequence[str]) -> int:
    config = _read_flags(EngineConfig, arguments)
    model = _open_model(config)
    configure_logging(
        service="engine",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
        error_messages=False,
    )
    config = with_planned_sizes(config)
    # gRPC reads this when it is imported. The worker is a new program, not a fork, so there is
    # nothing for gRPC to prepare or to warn of.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from services.engine.server import serve
    from services.engine.worker.executor import WorkerExecutor

    return uvloop.run(serve(config, model, lambda: WorkerExecutor(config)))


def _explain_cache(arguments: Sequence[str]) -> int:
    config = _read_flags(EngineConfig, arguments)
    _open_model(config)
    from services.engine.compilation.cache_key import compute_factors
    from services.engine.compilation.explain import explain
    from services.engine.worker.start.device import choose_device

    try:
        device = choose_device(config.worker, 0)
    except ValueError as error:
        raise _UsageError(str(error)) from error
    print(explain(config.compilation.compile_cache_dir, compute_factors(config, device)))  # noqa: T201  a tool's answer
    return 0


def _replay(arguments: Sequence[str]) -> int:
    from services.engine.replay.config import ReplayConfig

    config = _read_flags(ReplayConfig, arguments)
    _open_model(config)
    configure_logging(
        service="replay",
        level=config.observability.log_level,
        log_format=config.observability.log_format,
    )
    from services.engine.replay.command import replay
    from services.engine.replay.recording import ReplayError

    try:
        totals = replay(config, print)
    except ReplayError as error:
        raise _UsageError(str(error)) from error
    return 0 if totals.is_clean else DIFFERENT


def _plan_graphs(arguments: Sequence[str]) -> int:
    from services.engine.capture_sizes.command import plan_graphs

    return plan_graphs(list(arguments))


def _read_flags(kind: type[_Config], arguments: Sequence[str]) -> _Config:
    try:
        return read_flags(kind, arguments)
    except ValidationError as error:
        raise _UsageError("\noctavo engine: ".join(describe_problems(kind, error))) from error


def _open_model(config: EngineConfig) -> ModelFolder:
    try:
        model = ModelFolder.open(
            config.checkpoint.model,
            name=config.checkpoint.model_name,
            max_model_len=config.checkpoint.max_model_len,
            num_speculative_tokens=config.speculation.num_speculative_tokens,
        )
        check_table_memory(config, ModelConfig.from_folder(config.checkpoint.model))
    except ModelFolderError as error:
        raise _UsageError(str(error)) from error
    return model


if __name__ == "__main__":
    share_arenas()
    replace_standard_error()
    sys.exit(main())
