"""`octavo serve`: both services under supervision."""

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.client.channel import Tls
from services.client.stack import LOOPBACK, Stack, model_flags, plan_stack
from services.client.supervisor import Supervisor, run_until_signalled
from services.processes.standard_error import replace_standard_error

Port = Annotated[
    int, typer.Option(min=0, max=65535, help="The frontend's port; 0 takes a free one.")
]
EnginePort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="The first engine's port on loopback; 0 takes free ones."),
]


def serve(
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder in Hugging Face form; the embedded model if absent."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address the frontend listens on.")] = LOOPBACK,
    port: Port = 50050,
    engine_port: EnginePort = 50051,
    engines: Annotated[
        int, typer.Option(min=1, max=64, help="Engines to run, on ports one after the other.")
    ] = 1,
    engine_arg: Annotated[
        list[str],
        typer.Option(
            help="Flag for the engine, such as --engine-arg=--max-num-seqs=64; repeatable."
        ),
    ] = [],  # noqa: B006  typer copies it
    frontend_arg: Annotated[
        list[str],
        typer.Option(help="Flag for the frontend, in the same form; repeatable."),
    ] = [],  # noqa: B006  typer copies it
    tls: Tls,
) -> None:
    """Starts the services, one engine or several, and runs them until Ctrl-C, SIGTERM or SIGHUP.

    A service that dies is started again, five times in a row at most. Stopping lets running
    requests finish; a second Ctrl-C does not wait.

    Examples:
    - `octavo serve`

    - `octavo serve --model ~/models/qwen3-0.6b --host 0.0.0.0`

    - `octavo serve --engines 2`

    - `octavo serve --engine-arg=--max-num-seqs=64 --engine-arg=--dtype=bfloat16`

    - `octavo serve --frontend-arg="--tls-cert f.pem --tls-key f.key" --tls-ca ca.pem`
    """
    replace_standard_error()  # an unread line must not hold up the supervisor
    stack = plan_stack(
        host=host,
        port=port,
        engine_port=engine_port,
        num_engines=engines,
        engine_arguments=[*model_flags(model), *_words(engine_arg)],
        frontend_arguments=_words(frontend_arg),
        tls=tls,
    )
    supervisor = Supervisor(_report)
    asyncio.run(run_until_signalled(_serve(supervisor, stack), supervisor.kill))


async def _serve(supervisor: Supervisor, stack: Stack) -> None:
    try:
        # At the same time: each of them loads the model by itself.
        await asyncio.gather(*map(supervisor.start, stack.engines))
        await supervisor.start(stack.frontend)
        _report(f"talk to it:  octavo chat --frontend {stack.frontend.address}")
        for engine in stack.engines:
            _report(f"watch it:    octavo stats --engine {engine.address}")
        await supervisor.watch()
    finally:
        _report("stopping")
        await supervisor.stop()
        _report("stopped")


def _report(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _words(arguments: list[str]) -> list[str]:
    """Splits "--flag value" given as one argument, the way a shell would."""
    return [word for argument in arguments for word in shlex.split(argument)]
