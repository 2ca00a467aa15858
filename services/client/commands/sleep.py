"""`octavo sleep` and `octavo wake`: an engine gives its memory back for a while."""

from enum import StrEnum
from typing import Annotated

import typer

from protos.engine.v1 import operator_pb2
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.client.calls import ask
from services.client.channel import Tls
from services.client.console import echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress


class Mode(StrEnum):
    """The fate of live requests."""

    WAIT = "wait"
    RECOMPUTE = "recompute"
    ABORT = "abort"


def sleep(
    *,
    level: Annotated[
        int,
        typer.Option(
            min=1, max=2, help="1: weights go to host memory; 2: they are loaded again at waking."
        ),
    ] = 1,
    mode: Annotated[
        Mode,
        typer.Option(
            help="Running requests end first, are computed again after waking, or are aborted."
        ),
    ] = Mode.WAIT,
    timeout_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that requests have to end; else --drain-timeout-s."),
    ] = None,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Puts an engine to sleep: its memory of weights and KV cache becomes free.

    It must have --enable-sleep. Ctrl-C while requests end keeps it awake.

    Examples:
    - `octavo sleep`

    - `octavo sleep --level 2 --mode recompute`
    """
    request = operator_pb2.SleepRequest(level=level, mode=f"SLEEP_MODE_{mode.name}")
    if timeout_s is not None:
        request.timeout_ms = int(1000 * timeout_s)
    answer = ask(OperatorServiceStub, engine, tls, lambda stub: stub.Sleep(request))
    echo(f"asleep: {answer.num_bytes / 2**30:.2f} GiB are free after {answer.took_s:.2f} s")


def wake(*, engine: EngineAddress = DEFAULT_ENGINE, tls: Tls) -> None:
    """Wakes an engine; kept requests go on.

    Examples:
    - `octavo wake`
    """
    request = operator_pb2.WakeRequest()
    answer = ask(OperatorServiceStub, engine, tls, lambda stub: stub.Wake(request))
    echo(f"awake after {answer.took_s:.2f} s")
