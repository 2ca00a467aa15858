"""`octavo lora`: adapters of a running engine."""

from typing import Annotated

import typer

from protos.engine.v1 import operator_pb2
from services.client.channel import Tls
from services.client.console import echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress
from services.client.operator import call_operator
from services.processes.terminal_text import terminal_text

Name = Annotated[str, typer.Argument(help="The adapter's name in requests.")]


def add(
    name: Name,
    path: Annotated[
        str, typer.Argument(help="Its folder under --lora-folder, or OWNER/NAME[@REVISION].")
    ],
    *,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Loads an adapter into a running engine, which must have --lora-folder.

    Examples:
    - `octavo lora add sql adapters/sql`
    """
    request = operator_pb2.LoadAdapterRequest(name=name, path=path)
    answer = call_operator(engine, tls, lambda stub: stub.LoadAdapter(request))
    echo(f"{_line(answer.adapter)}")


def remove(name: Name, *, engine: EngineAddress = DEFAULT_ENGINE, tls: Tls) -> None:
    """Removes an adapter from a running engine; its running requests go on.

    Examples:
    - `octavo lora remove sql`
    """
    request = operator_pb2.RemoveAdapterRequest(name=name)
    call_operator(engine, tls, lambda stub: stub.RemoveAdapter(request))


def list_adapters(*, engine: EngineAddress = DEFAULT_ENGINE, tls: Tls) -> None:
    """Lists the adapters of a running engine.

    Examples:
    - `octavo lora list`
    """
    request = operator_pb2.ListAdaptersRequest()
    answer = call_operator(engine, tls, lambda stub: stub.ListAdapters(request))
    for adapter in answer.adapters:
        echo(_line(adapter))


def _line(adapter: operator_pb2.AdapterInfo) -> str:
    place = "on the device" if adapter.is_resident else "in host memory"
    name = terminal_text(adapter.name)
    return f"{name}: rank {adapter.rank}, {adapter.num_bytes / 2**20:.1f} MiB, {place}"
