"""`octavo health`: whether a service answers."""

import asyncio
from typing import Annotated

import typer

from services.client.health import is_serving


def health(
    *,
    address: Annotated[str, typer.Argument(help="The engine or the frontend, as host:port.")],
    service: Annotated[
        str, typer.Option(help="Health service; empty tells readiness, `liveness` liveness.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for an answer.")] = 2.0,
) -> None:
    """Exits 0 if a service is serving and 1 if not, for container health checks.

    Examples:
    - `octavo health 127.0.0.1:50051`

    - `octavo health 127.0.0.1:50051 --service liveness`
    """
    serving = asyncio.run(is_serving(address, service=service, timeout_s=timeout_s))
    typer.echo("serving" if serving else "not serving")
    raise typer.Exit(0 if serving else 1)
