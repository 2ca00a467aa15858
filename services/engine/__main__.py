"""Runs the engine service: `python -m services.engine --help`.

`python -m services.engine cache explain`, with the same flags, says what is compiled for them;
`python -m services.engine graphs plan` proposes capture sizes for the steps that were seen.
"""

import os
import sys

import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.engine.config import EngineConfig
from services.engine.core.capture_choice import with_planned_sizes
from services.engine.core.model_folder import ModelFolder, ModelFolderError
from services.telemetry.logging import configure_logging

USAGE_ERROR = 2
CACHE_EXPLAIN = ["cache", "explain"]
GRAPHS_PLAN = ["graphs", "plan"]


def main() -> int:
    """Reads the flags, serves, and returns the process's exit status."""
    arguments = sys.argv[1:]
    if arguments[: len(GRAPHS_PLAN)] == GRAPHS_PLAN:
        from services.engine.core.plan_command import plan_graphs

        return plan_graphs(arguments[len(GRAPHS_PLAN) :])
    explains_cache = arguments[: len(CACHE_EXPLAIN)] == CACHE_EXPLAIN
    if explains_cache:
        arguments = arguments[len(CACHE_EXPLAIN) :]
    try:
        config = CliApp.run(EngineConfig, cli_args=arguments)
        model = ModelFolder.open(
            config.model, name=config.model_name, max_model_len=config.max_model_len
        )
    except ValidationError as error:
        for problem in error.errors():
            flag = "--" + str(problem["loc"][0]).replace("_", "-")
            message = f"octavo engine: {flag} is {problem['input']!r}: {problem['msg']}"
            print(message, file=sys.stderr)  # noqa: T201  logging is not configured yet
        return USAGE_ERROR
    except ModelFolderError as error:
        print(f"octavo engine: {error}", file=sys.stderr)  # noqa: T201  as above
        return USAGE_ERROR
    if explains_cache:
        return _explain_cache(config)
    configure_logging(service="engine", level=config.log_level, log_format=config.log_format)
    config = with_planned_sizes(config)
    # gRPC reads this when it is imported. The worker is a new program, not a fork, so there is
    # nothing for gRPC to prepare or to warn of.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from services.engine.server import serve
    from services.engine.worker.executor import WorkerExecutor

    return uvloop.run(serve(config, model, lambda: WorkerExecutor(config)))


def _explain_cache(config: EngineConfig) -> int:
    """Prints what compiled pieces there are for a configuration on this machine."""
    from services.engine.compilation.cache_key import compute_factors
    from services.engine.compilation.explain import explain
    from services.engine.worker.device import choose_device

    try:
        device = choose_device(config, 0)
    except ValueError as error:
        print(f"octavo engine: {error}", file=sys.stderr)  # noqa: T201  a tool's answer
        return USAGE_ERROR
    settings = config.compilation_config(device.type)
    factors = compute_factors(settings, config, device)
    print(explain(settings.cache_dir, factors))  # noqa: T201  a tool's answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
