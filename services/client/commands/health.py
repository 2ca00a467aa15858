"""`octavo health`: whether a service answers."""

import asyncio
from typing import Annotated

import typer

from services.client.channel import Tls, open_channel
from services.client.commands.stats import Engine
from services.client.errors import OctavoError
from services.client.health import READINESS, is_serving


def health(
    *,
    address: Annotated[str, typer.Argument(help="The engine or the frontend, as host:port.")],
    service: Annotated[
        str, typer.Option(help="Health service; empty tells readiness, `liveness` liveness.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for an answer.")] = 2.0,
    tls: Tls,
) -> None:
    """Exits 0 if a service is serving and 1 if not, for container health checks.

    Of an engine that captures graphs it also tells how many of them can be used by now.

    Examples:
    - `octavo health 127.0.0.1:50051`

    - `octavo health 127.0.0.1:50051 --service liveness`
    """
    serving = asyncio.run(is_serving(address, service=service, timeout_s=timeout_s, tls=tls))
    graphs = asyncio.run(_graphs(address, tls)) if serving and service == READINESS else ""
    typer.echo(f"serving{graphs}" if serving else "not serving")
    raise typer.Exit(0 if serving else 1)


async def _graphs(address: str, tls: Tls) -> str:
    """Returns how far an engine's captures are; nothing for one without, or a frontend."""
    try:
        async with open_channel(address, tls) as channel:
            stats = await Engine(channel).stats()
    except OctavoError:
        return ""
    num_captured = sum(graph.captured for graph in stats.graphs)
    planned = stats.num_graphs_planned
    return f", graphs {num_captured}/{planned} captured" if planned else ""
