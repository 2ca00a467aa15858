"""`octavo health`: whether a service answers."""

import asyncio
from typing import Annotated

import grpc
import typer

from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.client.channel import Access, open_channel
from services.client.commands.stats import read_stats
from services.client.console import echo
from services.client.flags import checked
from services.client.health import READINESS, is_http_serving, is_serving

TIMEOUT_S = 2.0
"""Limit of the call for details."""


def health(
    *,
    address: Annotated[
        str, typer.Argument(callback=checked, help="The engine or the frontend, as host:port.")
    ],
    service: Annotated[
        str, typer.Option(help="Health service; empty means readiness, `liveness` liveness.")
    ] = "",
    http_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The frontend's port of HTTP, which must answer, too."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0, help="Longest wait for an answer.")] = 2.0,
    access: Access,
) -> None:
    """Exits 0 if a service is serving and 1 if not, for container health checks.

    For an engine that captures graphs it also reports how many of them can be used by now; for one
    that starts, the last stage and its rank; for a frontend with several engines, how many of them
    it uses, and why not the others. A frontend with API keys reports that only to keys with
    `may_list_engines`.

    Examples:
    - `octavo health 127.0.0.1:50051`

    - `octavo health 127.0.0.1:50051 --service liveness`

    - `octavo health 127.0.0.1:50050 --http-port 8000`
    """
    serving = asyncio.run(is_serving(address, service=service, timeout_s=timeout_s, tls=access.tls))
    if http_port is not None:
        host = address.rpartition(":")[0].strip("[]")
        serving &= is_http_serving(host, http_port, timeout_s=timeout_s, tls=access.tls)
    details = ""
    if service == READINESS:
        details = asyncio.run(_details(address, access, serving=serving))
    echo(("serving" if serving else "not serving") + details)
    raise typer.Exit(0 if serving else 1)


async def _details(address: str, access: Access, *, serving: bool) -> str:
    """Returns what there is to say of graphs or of engines, for the end of the line."""
    async with open_channel(address, access.tls) as channel:
        engines = await _engines(channel, access)
        return engines or await _worker(channel, serving=serving)


async def _engines(channel: grpc.aio.Channel, access: Access) -> str:
    """Returns how many engines a frontend uses and why not the others.

    It returns nothing for one engine that is used, for an engine itself, and to who may not know.
    """
    stub = frontend_pb2_grpc.FrontendServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
    try:
        listing = await stub.ListEngines(
            frontend_pb2.ListEnginesRequest(), timeout=TIMEOUT_S, metadata=access.metadata
        )
    except grpc.aio.AioRpcError:
        return ""
    unused = [engine for engine in listing.engines if not engine.ready]
    lines = [f"\n  {engine.address}: {engine.reason}" for engine in unused]
    if len(listing.engines) == 1:
        return "".join(lines)
    num_used = len(listing.engines) - len(unused)
    return "".join([f", engines {num_used}/{len(listing.engines)} used", *lines])


async def _worker(channel: grpc.aio.Channel, *, serving: bool) -> str:
    """Returns how far an engine's captures or its worker's start are; nothing for a frontend."""
    try:
        stats = await read_stats(EngineServiceStub(channel))  # type: ignore[no-untyped-call]  # generated
    except grpc.aio.AioRpcError:
        return ""
    if not serving:
        return stats.worker_progress and f", {stats.worker_progress}"
    num_captured = sum(graph.captured for graph in stats.graphs)
    planned = stats.num_graphs_planned
    return f", graphs {num_captured}/{planned} captured" if planned else ""
