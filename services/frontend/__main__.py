"""Runs the frontend service: `python -m services.frontend --help`."""

from services.processes.address_space import require_address_space
from services.processes.stop_signals import end_quietly_on_interrupt

if __name__ == "__main__":
    end_quietly_on_interrupt()  # now: the other imports take a second
    require_address_space("octavo frontend")  # and the space

import sys
from inspect import cleandoc

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.frontend.config import VARIABLE_PREFIX, FrontendConfig
from services.frontend.process_group import ProcessGroup, Share
from services.processes.allocator import share_arenas
from services.processes.descriptors import raise_descriptor_limit
from services.processes.grpc_variables import set_grpc_variables
from services.processes.standard_error import replace_standard_error
from services.settings.flags import reason_of
from services.settings.installation import MissingExtraError, require_extras
from services.settings.variables import warn_of_unknown_variables
from services.telemetry.logging import configure_logging

USAGE_ERROR = 2


def main() -> int:
    """Reads the flags, serves, and returns the process's exit status."""
    # Python 3.13 removes the docstring's indentation; help shows the docstring unchanged.
    FrontendConfig.__doc__ = cleandoc(FrontendConfig.__doc__ or "")
    try:
        require_extras("frontend")
        config = CliApp.run(FrontendConfig)
    except MissingExtraError as error:
        print(f"octavo frontend: {error}", file=sys.stderr)  # noqa: T201  as below
        return USAGE_ERROR
    except ValidationError as error:
        for problem in error.errors():
            flags = (str(name).replace("_", "-") for name in problem["loc"][:1])
            place = "".join(f"--{flag} is {problem['input']!r}: " for flag in flags)
            message = f"octavo frontend: {place}{reason_of(problem)}"
            print(message, file=sys.stderr)  # noqa: T201  logging is not configured yet
        return USAGE_ERROR
    if config.tokenizer is not None and not (config.tokenizer / "tokenizer.json").is_file():
        message = f"octavo frontend: --tokenizer: no tokenizer.json in {config.tokenizer}"
        print(message, file=sys.stderr)  # noqa: T201  as above
        return USAGE_ERROR
    configure_logging(
        service="frontend",
        level=config.log_level,
        log_format=config.log_format,
        error_messages=False,
    )
    warn_of_unknown_variables(VARIABLE_PREFIX, FrontendConfig.model_fields)
    set_grpc_variables()
    if config.processes == 1:
        return _serve(config, None)
    try:
        group = ProcessGroup(config, _serve)
    except OSError as error:
        structlog.get_logger().error("frontend_start_failed", error=str(error))
        return 1
    return group.run()


def _serve(config: FrontendConfig, share: Share | None) -> int:
    from services.frontend.server import serve

    return uvloop.run(serve(config, share))


if __name__ == "__main__":
    raise_descriptor_limit()
    share_arenas()
    replace_standard_error()
    sys.exit(main())
