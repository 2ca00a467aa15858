"""`octavo lora`: adapters of a running engine, or of all engines of a frontend."""

from typing import Annotated, Any, TypeAlias

import typer
from google.protobuf.message import Message

from protos.engine.v1 import operator_pb2
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from protos.frontend.v1 import operator_pb2 as fleet_pb2
from protos.frontend.v1.operator_pb2_grpc import OperatorServiceStub as FleetStub
from services.client.calls import ask
from services.client.channel import Access
from services.client.console import echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress, checked
from services.processes.terminal_text import terminal_text

Name = Annotated[str, typer.Argument(help="The adapter's name in requests.")]
Fleet: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--frontend",
        callback=checked,
        help="Ask this frontend, as host:port, to order it at all its engines.",
    ),
]


def add(
    name: Name,
    path: Annotated[
        str, typer.Argument(help="Its folder under --lora-folder, or OWNER/NAME[@REVISION].")
    ],
    *,
    engine: EngineAddress = DEFAULT_ENGINE,
    frontend: Fleet = None,
    model: Annotated[
        str, typer.Option(help="Its model, where several share the frontend's card.")
    ] = "",
    access: Access,
) -> None:
    """Loads an adapter into a running engine, which must have --lora-folder.

    Examples:
    - `octavo lora add sql adapters/sql`

    - `octavo lora add sql adapters/sql --frontend 127.0.0.1:50050`
    """
    if frontend is not None:
        order = fleet_pb2.LoadAdapterRequest(name=name, path=path, model=model)
        loaded = _ask_fleet(frontend, access, "LoadAdapter", order)
        echo(_fleet_line(loaded.adapter))
        return
    request = operator_pb2.LoadAdapterRequest(name=name, path=path)
    answer = ask(OperatorServiceStub, engine, access.tls, lambda stub: stub.LoadAdapter(request))
    echo(_line(answer.adapter))


def remove(
    name: Name,
    *,
    engine: EngineAddress = DEFAULT_ENGINE,
    frontend: Fleet = None,
    access: Access,
) -> None:
    """Removes an adapter from a running engine; its running requests go on.

    Examples:
    - `octavo lora remove sql`
    """
    if frontend is not None:
        order = fleet_pb2.RemoveAdapterRequest(name=name)
        _ask_fleet(frontend, access, "RemoveAdapter", order)
        return
    request = operator_pb2.RemoveAdapterRequest(name=name)
    ask(OperatorServiceStub, engine, access.tls, lambda stub: stub.RemoveAdapter(request))


def list_adapters(
    *, engine: EngineAddress = DEFAULT_ENGINE, frontend: Fleet = None, access: Access
) -> None:
    """Lists the adapters of a running engine.

    Examples:
    - `octavo lora list`
    """
    if frontend is not None:
        order = fleet_pb2.ListAdaptersRequest()
        found = _ask_fleet(frontend, access, "ListAdapters", order)
        for each in found.adapters:
            echo(_fleet_line(each))
        return
    request = operator_pb2.ListAdaptersRequest()
    answer = ask(OperatorServiceStub, engine, access.tls, lambda stub: stub.ListAdapters(request))
    for adapter in answer.adapters:
        echo(_line(adapter))


def _ask_fleet(address: str, access: Access, method: str, order: Message) -> Any:
    """Has a frontend order something at all its engines, and returns its answer."""
    return ask(
        FleetStub,
        address,
        access.tls,
        lambda stub: getattr(stub, method)(order, metadata=access.metadata),
    )


def _line(adapter: operator_pb2.AdapterInfo) -> str:
    place = "on the device" if adapter.is_resident else "in host memory"
    name = terminal_text(adapter.name)
    return f"{name}: rank {adapter.rank}, {adapter.num_bytes / 2**20:.1f} MiB, {place}"


def _fleet_line(adapter: fleet_pb2.FleetAdapter) -> str:
    name = terminal_text(adapter.name)
    return f"{name}: {adapter.num_engines} engines, on {adapter.num_resident} devices"
