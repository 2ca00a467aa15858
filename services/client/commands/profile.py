"""`octavo profile`: traces of what the engine's worker does in its steps."""

from typing import Annotated

import typer

from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.engine.v1.worker_pb2 import ProfileEnd
from services.client.calls import ask
from services.client.channel import Tls
from services.client.console import echo
from services.client.flags import DEFAULT_ENGINE, EngineAddress

_ENDS = {
    ProfileEnd.PROFILE_END_STEPS: " (it had seen --steps)",
    ProfileEnd.PROFILE_END_TIME: " (its time was over)",
    ProfileEnd.PROFILE_END_MEMORY: " (it took --profile-max-mb of memory)",
}


def start(
    *,
    steps: Annotated[int | None, typer.Option(min=1, help="End it after this many steps.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="End it after this long; by default --profile-max-s."),
    ] = None,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Starts a profile of the engine's steps; prints the file that will hold its trace.

    The engine must run with --profile-dir, where the file appears when the profile ends: after
    `--steps` or `--seconds`, or by `octavo profile stop`. https://ui.perfetto.dev shows it.

    Examples:
    - `octavo profile start --steps 50`

    - `octavo profile start; sleep 3; octavo profile stop`
    """
    request = engine_pb2.StartProfileRequest(max_steps=steps)
    if seconds is not None:
        request.duration_ms = round(seconds * 1000)
    echo(ask(EngineServiceStub, engine, tls, lambda stub: stub.StartProfile(request)).path)


def stop(*, engine: EngineAddress = DEFAULT_ENGINE, tls: Tls) -> None:
    """Ends the running profile and waits for its trace.

    Examples:
    - `octavo profile stop`
    """
    request = engine_pb2.StopProfileRequest()
    report = ask(EngineServiceStub, engine, tls, lambda stub: stub.StopProfile(request))
    echo(
        f"{report.path}: {report.num_steps} steps in {report.duration_s:.1f} s, "
        f"{report.num_bytes} bytes{_ENDS.get(report.end, '')}"
    )
