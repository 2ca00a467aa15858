"""`octavo weights`: the weights of a running engine."""

from enum import Enum
from typing import Annotated

import typer

from protos.engine.v1.operator_pb2 import WeightsInfo
from services.client.channel import Access, Tls
from services.client.console import echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress
from services.client.weights import WeightsClient
from services.processes.terminal_text import terminal_text


class RunningRequests(Enum):
    """The way of running requests when the weights change."""

    FINISH = "finish"
    RECOMPUTE = "recompute"
    KEEP = "keep"


def update(
    *,
    version: Annotated[str, typer.Option(help="Name of the new weights in answers.")],
    folder: Annotated[
        str, typer.Option("--from", help="The checkpoint's folder under --weights-folder.")
    ] = "",
    shared_memory: Annotated[
        str, typer.Option(help="Name of a shared memory object with a safetensors file, instead.")
    ] = "",
    running: Annotated[
        RunningRequests,
        typer.Option(
            help="Running requests finish on the old weights first, start over under the new ones, "
            "or keep their cache and go on."
        ),
    ] = RunningRequests.FINISH,
    is_part: Annotated[
        bool, typer.Option("--part", help="Tensors may be missing, which keep their values.")
    ] = False,
    sha256: Annotated[
        str, typer.Option(help="Digest of `cat *.safetensors` in the folder, hexadecimal.")
    ] = "",
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Replaces the weights of a running engine, which must have --weights-folder.

    Examples:
    - `octavo weights update --from step-12 --version 12 --running recompute`
    """
    if bool(folder) == bool(shared_memory):
        raise typer.BadParameter("give either --from or --shared-memory")
    try:
        digest = bytes.fromhex(sha256)
    except ValueError:
        raise typer.BadParameter("--sha256 must be hexadecimal") from None
    with WeightsClient(engine, access=Access(tls=tls)) as client:
        info = client.update(
            folder,
            version=version,
            running=running.value,
            is_part=is_part,
            shared_memory=shared_memory,
            sha256=digest,
        )
    echo(
        f"{_name(info)} serves; steps stopped for {info.pause_ms:.0f} ms, "
        f"{info.num_moved_requests} running requests went on under it"
    )


def show(*, engine: EngineAddress = DEFAULT_ENGINE, tls: Tls) -> None:
    """Shows which weights a running engine serves.

    Examples:
    - `octavo weights show`
    """
    with WeightsClient(engine, access=Access(tls=tls)) as client:
        info = client.show()
    updating = "; an update runs" if info.is_updating else ""
    echo(f"{_name(info)}, after {info.num_updates} updates{updating}")


def _name(info: WeightsInfo) -> str:
    return f"version {terminal_text(info.version)}" if info.version else "the weights of the start"
