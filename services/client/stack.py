"""The two services as processes on this machine."""

import argparse
import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.client.channel import PLAIN, Tls
from services.client.supervisor import Service, ServiceFailedError
from services.listen_address import bracketed
from services.processes.child import python_command

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Engines and a frontend that talks to them."""

    engines: tuple[Service, ...]
    frontend: Service


def service_command(name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs one service, "engine" or "frontend", in our place."""
    return python_command(f"services.{name}", arguments)


def plan_stack(
    *,
    host: str = LOOPBACK,
    port: int = 0,
    engine_port: int = 0,
    engine_environments: Sequence[Mapping[str, str]] = ({},),
    engine_arguments: Sequence[str] = (),
    frontend_arguments: Sequence[str] = (),
    log_folder: Path | None = None,
    tls: Tls = PLAIN,
) -> Stack:
    """Says how to run both services.

    Args:
        host: address the frontend listens on; engines stay on loopback.
        port: the frontend's port; 0 takes a free one.
        engine_port: the first engine's port, the others have the next ones; 0 takes free ones.
        engine_environments: for each engine to run, variables that it gets besides ours.
        engine_arguments: more flags for the engines; a port of metrics that they name is the first
            engine's, and the others have the next ones.
        frontend_arguments: more flags for the frontend.
        log_folder: where their logs go; None leaves them on standard error.
        tls: how the frontend's health is asked, where its arguments make it speak TLS.

    Raises:
        ServiceFailedError: an address cannot be listened on now, or two services would have one.
    """
    num_engines = len(engine_environments)
    engine_addresses = [
        f"{LOOPBACK}:{choose_port(LOOPBACK, engine_port and engine_port + index)}"
        for index in range(num_engines)
    ]
    metrics_flags = _metrics_flags(engine_arguments, num_engines)
    frontend_address = f"{bracketed(host)}:{choose_port(host, port)}"
    if _port_of(frontend_address) in map(_port_of, engine_addresses):
        # The engine's health would pass for the frontend's.
        raise ServiceFailedError(
            f"the frontend and an engine cannot both have port {_port_of(frontend_address)}"
        )
    for _, metrics_port in filter(None, metrics_flags):
        if metrics_port in map(_port_of, [frontend_address, *engine_addresses]):
            raise ServiceFailedError(
                f"an engine's metrics and a service cannot both have port {metrics_port}"
            )
    names = ["engine"] if num_engines == 1 else [f"engine-{i + 1}" for i in range(num_engines)]
    frontend_flags = [
        *_listen_flags(frontend_address),
        "--engine-address",
        ",".join(engine_addresses),
    ]
    return Stack(
        engines=tuple(
            Service(
                name=name,
                module="services.engine",
                arguments=[*_listen_flags(address), *engine_arguments, *metrics],
                address=address,
                log=log_folder / f"{name}.log" if log_folder else None,
                environment=environment,
            )
            for name, address, environment, metrics in zip(
                names, engine_addresses, engine_environments, metrics_flags, strict=True
            )
        ),
        frontend=Service(
            name="frontend",
            module="services.frontend",
            arguments=[*frontend_flags, *frontend_arguments],
            # A listener on all addresses answers on loopback.
            address=frontend_address.replace("0.0.0.0", LOOPBACK).replace("[::]", "[::1]"),
            log=log_folder / "frontend.log" if log_folder else None,
            tls=tls,
        ),
    )


def _listen_flags(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host, "--port", port]


def _metrics_flags(
    engine_arguments: Sequence[str], num_engines: int, environ: Mapping[str, str] = os.environ
) -> list[list[str]]:
    """Returns the flags that give each engine its own port of metrics, if it must have one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    named = environ.get("OCTAVO_ENGINE_METRICS_PORT")
    parser.add_argument("--metrics-port", type=int, default=named)
    try:
        first = parser.parse_known_args(engine_arguments)[0].metrics_port
    except argparse.ArgumentError as error:
        raise ServiceFailedError(f"the engine's flags: {error}", exit_code=2) from None
    if not first:  # none, or a free one for each
        return [[] for _ in range(num_engines)]
    return [
        ["--metrics-port", str(choose_port(LOOPBACK, first + index))]
        for index in range(num_engines)
    ]


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]


def choose_port(host: str, port: int) -> int:
    """Returns `port`, or a free one for 0. Fixed before the start, it survives restarts.

    Without the look beforehand, another process that holds the port would pass for our service.
    """
    if not 0 <= port <= MAX_PORT:
        raise ServiceFailedError(f"cannot listen on {host}:{port}: ports end at {MAX_PORT}")
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        hint = " (port 0 takes a free one)" if error.errno == errno.EADDRINUSE else ""
        raise ServiceFailedError(
            f"cannot listen on {host}:{port}: {error.strerror}{hint}"
        ) from None
