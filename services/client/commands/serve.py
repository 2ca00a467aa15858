"""`octavo serve`: both services under supervision."""

import argparse
import asyncio
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from services.client.channel import Tls
from services.client.console import echo
from services.client.gpus import divide_gpus, engine_needs, visible_gpus
from services.client.model import engine_flags
from services.client.stack import LOOPBACK, Stack, choose_port, plan_stack
from services.client.supervisor import Supervisor, run_until_signalled
from services.extras import require_extras
from services.processes.standard_error import replace_standard_error

Port = Annotated[
    int, typer.Option(min=0, max=65535, help="The frontend's port; 0 takes a free one.")
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the OpenAI-compatible HTTP API; 0 takes a free one, no HTTP when absent.",
    ),
]
EnginePort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="The first engine's port on loopback; 0 takes free ones."),
]


def serve(  # noqa: PLR0913  a parameter is a flag
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder in Hugging Face form, or OWNER/NAME[@REVISION] on the hub; "
            "the embedded model if absent."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address the frontend listens on.")] = LOOPBACK,
    port: Port = 50050,
    http_port: HttpPort = None,
    engine_port: EnginePort = 50051,
    engines: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Engines to run, on ports one after the other (for metrics, too), each with GPUs "
            "of its own.",
        ),
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
    requests finish; a second Ctrl-C does not wait. When a service cannot start, the exit code is
    that service's.

    Examples:
    - `octavo serve --http-port 8000`

    - `octavo serve --model Qwen/Qwen3-0.6B --http-port 8000`

    - `octavo serve --model ~/models/qwen3-0.6b --host 0.0.0.0`

    - `octavo serve --engines 2`

    - `octavo serve --engine-arg=--max-num-seqs=64 --engine-arg=--dtype=bfloat16`

    - `octavo serve --frontend-arg="--tls-cert f.pem --tls-key f.key" --tls-ca ca.pem`
    """
    require_extras("engine", "frontend")
    frontend_words, engine_words = _words(frontend_arg), _words(engine_arg)
    if http_port is not None:
        frontend_words += ["--http-port", str(choose_port(host, http_port))]
    environments = divide_gpus(engines, engine_needs(engine_words), visible_gpus())
    model_words = engine_flags(model)
    replace_standard_error()  # an unread line must not hold up the supervisor
    stack = plan_stack(
        host=host,
        port=port,
        engine_port=engine_port,
        engine_environments=environments,
        engine_arguments=[*model_words, *engine_words],
        frontend_arguments=frontend_words,
        tls=tls,
    )
    supervisor = Supervisor(_report)
    asyncio.run(run_until_signalled(_serve(supervisor, stack), supervisor.kill))


async def _serve(supervisor: Supervisor, stack: Stack) -> None:
    try:
        # At the same time: each of them loads the model by itself.
        await asyncio.gather(*map(supervisor.start, stack.engines))
        await supervisor.start(stack.frontend)
        for line in closing_lines(stack):
            _report(line)
        await supervisor.watch()
    finally:
        _report("stopping")
        await supervisor.stop()
        _report("stopped")


def closing_lines(stack: Stack) -> Iterator[str]:
    """Yields a line for each address that the services listen on, with what it is for."""
    frontend = stack.frontend
    yield f"talk to it:  octavo chat --frontend {frontend.address}"
    host, own = frontend.address.rpartition(":")[0], _addresses(frontend.arguments)
    scheme = "http" if own.tls_cert is None else "https"
    if own.http_port:
        yield f"over HTTP:   {scheme}://{host}:{own.http_port}/v1"
    if own.metrics_port:
        yield f"metrics:     {scheme}://{host}:{own.metrics_port}/metrics"
    for engine in stack.engines:
        yield f"watch it:    octavo stats --engine {engine.address}"
        own = _addresses(engine.arguments)
        scheme = "http" if own.tls_cert is None else "https"
        if own.metrics_port:
            yield f"metrics:     {scheme}://{LOOPBACK}:{own.metrics_port}/metrics"


def _addresses(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads a service's flags that decide where it listens."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--tls-cert")
    known, _ = parser.parse_known_args(arguments)
    return known


def _report(line: str) -> None:
    echo(line, err=True)


def _words(arguments: list[str]) -> list[str]:
    """Splits "--flag value" given as one argument, the way a shell would."""
    return [word for argument in arguments for word in shlex.split(argument)]
