"""Runs the engine service: `python -m services.engine --help`."""

import os
import sys

import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.engine.config import EngineConfig
from services.engine.core.model_folder import ModelFolder, ModelFolderError
from services.telemetry.logging import configure_logging

USAGE_ERROR = 2


def main() -> int:
    """Reads the flags, serves, and returns the process's exit status."""
    try:
        config = CliApp.run(EngineConfig)
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
    configure_logging(service="engine", level=config.log_level, log_format=config.log_format)
    # gRPC reads this when it is imported. The worker is a new program, not a fork, so there is
    # nothing for gRPC to prepare or to warn of.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from services.engine.server import serve
    from services.engine.worker.executor import WorkerExecutor

    return uvloop.run(serve(config, model, lambda: WorkerExecutor(config)))


if __name__ == "__main__":
    sys.exit(main())
