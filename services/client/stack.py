"""The two services as processes on this machine."""

import argparse
import contextlib
import errno
import os
import socket
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.client.channel import PLAIN, Tls
from services.client.service_flags import read_flags
from services.client.supervisor import Service, ServiceFailedError
from services.processes.child import python_command
from services.settings.addresses import bracketed

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
HTTP_PORT = 8000
"""Port of HTTP, if it is free."""
MAX_PORTS_TRIED = 100


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
        f"{LOOPBACK}:{choose_port(LOOPBACK, engine_port and engine_port + index, '--engine-port')}"
        for index in range(num_engines)
    ]
    metrics_flags = _metrics_flags(engine_arguments, num_engines)
    frontend_address = f"{bracketed(host)}:{choose_port(host, port, '--port')}"
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


def with_models(stack: Stack, model_arguments: Sequence[Sequence[str]]) -> Stack:
    """Returns the stack with a model for each engine; they share a card, so they start asleep."""
    engines = tuple(
        replace(engine, arguments=[*engine.arguments, *own], starts_asleep=True)
        for engine, own in zip(stack.engines, model_arguments, strict=True)
    )
    return replace(stack, engines=engines)


def with_http(stack: Stack, port: int | None) -> Stack:
    """Returns the stack with a frontend that speaks HTTP, too, on its own address.

    Args:
        stack: it is returned unchanged if the frontend's flags name a port of HTTP already.
        port: the port, 0 for any free one, or None for the first free one from HTTP_PORT on.

    Raises:
        ServiceFailedError: the port cannot be listened on now, or a service has it.
    """
    frontend = stack.frontend
    listeners = _listeners(frontend)
    if listeners.http_port is not None:
        return stack
    services = (*stack.engines, frontend)
    taken = {int(_port_of(service.address)) for service in services}
    taken |= {_listeners(service).metrics_port for service in services}
    if port is None:
        chosen = _first_free_port(listeners.host, HTTP_PORT, taken)
    else:
        chosen = choose_port(listeners.host, port, "--http-port")
    if chosen in taken:
        raise ServiceFailedError(f"HTTP and another listener cannot both have port {chosen}")
    arguments = [*frontend.arguments, "--http-port", str(chosen)]
    return replace(stack, frontend=replace(frontend, arguments=arguments))


def check_tls(stack: Stack) -> None:
    """Checks that the frontend is asked for its health in the way in which it answers.

    Raises:
        ServiceFailedError: one of both is plain text, and the other TLS.
    """
    has_certificate = _listeners(stack.frontend).tls_cert is not None
    has_authority = stack.frontend.tls.tls_ca is not None
    if has_certificate and not has_authority:
        raise ServiceFailedError(
            "the frontend has a certificate: --tls-ca FILE must name its authority (PEM), so that "
            "it can be asked whether it is ready",
            exit_code=2,
        )
    if has_authority and not has_certificate:
        raise ServiceFailedError(
            "--tls-ca is for a frontend with TLS, and this one has no certificate; "
            '--frontend-arg="--tls-cert FILE --tls-key FILE" gives it one',
            exit_code=2,
        )


def closing_lines(stack: Stack, model: str = "") -> Iterator[str]:
    """Yields a line for each address that the services listen on, with what it is for.

    model: one of several, which requests have to name.
    """
    frontend = stack.frontend
    named = model and f" --model {model}"
    yield f"talk to it:  octavo chat --frontend {frontend.address}{named}"
    host, own = frontend.address.rpartition(":")[0], _listeners(frontend)
    scheme = "http" if own.tls_cert is None else "https"
    if own.http_port:
        yield f"over HTTP:   {scheme}://{host}:{own.http_port}/v1"
    if own.metrics_port:
        yield f"metrics:     {scheme}://{host}:{own.metrics_port}/metrics"
    for engine in stack.engines:
        yield f"watch it:    octavo stats --engine {engine.address}"
        own = _listeners(engine)
        scheme = "http" if own.tls_cert is None else "https"
        if own.metrics_port:
            yield f"metrics:     {scheme}://{LOOPBACK}:{own.metrics_port}/metrics"


def http_port_of(stack: Stack) -> int | None:
    """Returns the frontend's port of HTTP; None without HTTP."""
    port: int | None = _listeners(stack.frontend).http_port
    return port


def _listeners(service: Service, environ: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Reads a service's flags that decide where it listens."""
    prefix = f"OCTAVO_{service.module.rpartition('.')[2].upper()}_"
    return read_flags(
        service.arguments,
        service.name,
        host=(str, None),
        http_port=(int, None),
        metrics_port=(int, environ.get(f"{prefix}METRICS_PORT")),
        tls_cert=(str, environ.get(f"{prefix}TLS_CERT")),
    )


def _listen_flags(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host, "--port", port]


def _metrics_flags(
    engine_arguments: Sequence[str], num_engines: int, environ: Mapping[str, str] = os.environ
) -> list[list[str]]:
    """Returns the flags that give each engine its own port of metrics, if it must have one."""
    named = environ.get("OCTAVO_ENGINE_METRICS_PORT")
    first = read_flags(engine_arguments, "engine", metrics_port=(int, named)).metrics_port
    if not first:  # none, or a free one for each
        return [[] for _ in range(num_engines)]
    return [
        ["--metrics-port", str(choose_port(LOOPBACK, first + index, "--metrics-port"))]
        for index in range(num_engines)
    ]


def _port_of(address: str) -> str:
    return address.rpartition(":")[2]


def _first_free_port(host: str, first: int, taken: Container[int]) -> int:
    """Returns the first port from `first` on that is free and not in `taken`."""
    for port in range(first, first + MAX_PORTS_TRIED):
        if port not in taken:
            with contextlib.suppress(ServiceFailedError):
                return choose_port(host, port, "--http-port")
    return choose_port(host, 0, "--http-port")


def choose_port(host: str, port: int, flag: str) -> int:
    """Returns `port`, or a free one for 0. Fixed before the start, it survives restarts.

    Without the look beforehand, another process that holds the port would pass for our service.

    Args:
        host: address to listen on.
        port: the port to look at.
        flag: the flag that names the port, for messages.

    Raises:
        ServiceFailedError: the port cannot be listened on now.
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
        hint = f" ({flag} 0 takes a free one)" if error.errno == errno.EADDRINUSE else ""
        raise ServiceFailedError(
            f"cannot listen on {host}:{port}: {error.strerror}{hint}"
        ) from None
