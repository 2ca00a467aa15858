"""`octavo worker-node`: reads the flags and runs a node until it is stopped."""

import asyncio
import sys
from inspect import cleandoc

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from services.engine.edge.node_secret import NodeSecret, NodeSecretError
from services.engine.node.config import VARIABLE_PREFIX, NodeConfig
from services.engine.node.node import Node, RefusedNodeError
from services.engine.worker.meeting import interface_address
from services.processes.stop_signals import stop_signals
from services.settings.flags import CLI_PREFIX, reason_of
from services.settings.variables import warn_of_unknown_variables
from services.telemetry.logging import configure_logging
from services.telemetry.stacks import show_stacks_on_signal
from services.transport.tls import ClientTls, TlsFilesError

USAGE_ERROR = 2

log = structlog.get_logger()


def run_node(arguments: list[str]) -> int:
    """Runs a node and returns the process's exit status: 1 if the engine refuses it."""
    # Python 3.13 removes the docstring's indentation; help shows the docstring unchanged.
    NodeConfig.__doc__ = cleandoc(NodeConfig.__doc__ or "")
    try:
        config = CliApp.run(NodeConfig, cli_args=arguments)
        interface_address(config.interface)
        secret = NodeSecret.from_file(config.secret_file)
        tls = ClientTls.from_settings(
            ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, prefix="--tls"
        )
    except ValidationError as error:
        for problem in error.errors():
            flag = "".join(f"--{str(name).replace('_', '-')}: " for name in problem["loc"])
            _complain(f"{flag}{reason_of(problem)}")
        return USAGE_ERROR
    except (NodeSecretError, TlsFilesError, ValueError) as error:
        _complain(str(error).removeprefix(CLI_PREFIX))
        return USAGE_ERROR
    configure_logging(service="node", level=config.log_level, log_format=config.log_format)
    warn_of_unknown_variables(VARIABLE_PREFIX, NodeConfig.model_fields)
    return uvloop.run(_run(Node(config, secret, tls)))


async def _run(node: Node) -> int:
    show_stacks_on_signal()
    running = asyncio.create_task(node.run())
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except RefusedNodeError as error:
        log.error("node_was_refused", error=str(error))  # noqa: TRY400  the reason is enough
        return 1
    except asyncio.CancelledError:
        log.info("node_stopped")
    return 0


def _complain(message: str) -> None:
    print(f"octavo worker-node: {message}", file=sys.stderr)  # noqa: T201  for the operator
