"""The two services as processes on this machine."""

import errno
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.client.channel import PLAIN, Tls
from services.client.supervisor import Service, ServiceFailedError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """An engine and a frontend that talks to it."""

    engine: Service
    frontend: Service


def service_command(name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs one service, "engine" or "frontend"."""
    return [sys.executable, "-m", f"services.{name}", *arguments]


def plan_stack(
    *,
    model: Path | None = None,
    host: str = LOOPBACK,
    port: int = 0,
    engine_port: int = 0,
    engine_arguments: Sequence[str] = (),
    frontend_arguments: Sequence[str] = (),
    log_folder: Path | None = None,
    tls: Tls = PLAIN,
) -> Stack:
    """Says how to run both services.

    Args:
        model: checkpoint folder; None means the embedded model.
        host: address the frontend listens on; the engine stays on loopback.
        port: the frontend's port; 0 takes a free one.
        engine_port: the engine's port; 0 takes a free one.
        engine_arguments: more flags for the engine.
        frontend_arguments: more flags for the frontend.
        log_folder: where their logs go; None leaves them on standard error.
        tls: how the frontend's health is asked, where its arguments make it speak TLS.

    Raises:
        ServiceFailedError: nobody can listen on one of the addresses now.
    """
    engine_address = f"{LOOPBACK}:{_choose_port(LOOPBACK, engine_port)}"
    frontend_address = f"{host}:{_choose_port(host, port)}"
    engine_flags = _listen_flags(engine_address)
    if model is not None:
        engine_flags += ["--model", str(model)]
    frontend_flags = [*_listen_flags(frontend_address), "--engine-address", engine_address]
    return Stack(
        engine=Service(
            name="engine",
            command=service_command("engine", [*engine_flags, *engine_arguments]),
            address=engine_address,
            log=log_folder / "engine.log" if log_folder else None,
        ),
        frontend=Service(
            name="frontend",
            command=service_command("frontend", [*frontend_flags, *frontend_arguments]),
            # A listener on all addresses answers on loopback.
            address=frontend_address.replace("0.0.0.0", LOOPBACK),
            log=log_folder / "frontend.log" if log_folder else None,
            tls=tls,
        ),
    )


def _listen_flags(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host, "--port", port]


def _choose_port(host: str, port: int) -> int:
    """Returns `port`, or a free one for 0. Fixed before the start, it survives restarts.

    Without the look beforehand, whoever holds the port already would pass for our service.
    """
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
