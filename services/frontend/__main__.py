"""Runs the frontend service: `python -m services.frontend --help`."""

from services.processes.address_space import require_address_space
from services.processes.grpc_variables import set_grpc_variables
from services.processes.stop_signals import end_quietly_on_interrupt

if __name__ == "__main__":
    end_quietly_on_interrupt()  # now: the other imports take a second
    require_address_space("octavo frontend")  # and the space
    set_grpc_variables()  # gRPC is one of them

import sys

import structlog
import uvloop

from services.frontend.command import read_config
from services.frontend.config import VARIABLE_PREFIX, FrontendConfig
from services.frontend.process_group import ProcessGroup, Share
from services.processes.allocator import share_arenas
from services.processes.descriptors import raise_descriptor_limit
from services.processes.standard_error import replace_standard_error
from services.settings.flags import UsageError
from services.settings.installation import MissingExtraError, require_extras
from services.settings.variables import warn_of_unknown_variables
from services.telemetry.logging import configure_logging

USAGE_ERROR = 2


def main() -> int:
    """Reads the flags, serves, and returns the process's exit status."""
    try:
        require_extras("frontend")
        config = read_config(sys.argv[1:])
    except (MissingExtraError, UsageError) as error:
        for line in str(error).splitlines():
            message = f"octavo frontend: {line}"
            print(message, file=sys.stderr)  # noqa: T201  logging is not configured yet
        return USAGE_ERROR
    configure_logging(
        service="frontend",
        level=config.log_level,
        log_format=config.log_format,
        error_messages=False,
    )
    warn_of_unknown_variables(VARIABLE_PREFIX, FrontendConfig.model_fields)
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
