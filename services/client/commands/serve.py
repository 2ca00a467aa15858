"""`octavo serve`: both services under supervision."""

import asyncio
import shlex
from collections.abc import Iterator
from typing import Annotated

import typer

from services.client.channel import Tls
from services.client.console import echo
from services.client.serve_flags import ServeFlagError, divide_arguments
from services.client.serve_plan import ServeOptions, ServePlan, plan_services
from services.client.service_flags import ServiceFlags
from services.client.shared_card import start_in_turn
from services.client.stack import (
    HTTP_PORT,
    LOOPBACK,
    Stack,
    check_tls,
    closing_lines,
    http_port_of,
    plan_stack,
    with_http,
    with_models,
)
from services.client.supervisor import ServiceFailedError, Supervisor, run_until_signalled
from services.processes.standard_error import replace_standard_error
from services.settings.flags import UsageError
from services.settings.installation import require_extras

DEFAULT_PORT = 50050
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="The frontend's port of gRPC; 0 takes a free one.")
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        envvar="OCTAVO_FRONTEND_HTTP_PORT",
        help="Port of the OpenAI-compatible HTTP API, 0 for any free one; the first free one from "
        f"{HTTP_PORT} on if absent.",
    ),
]
Http = Annotated[bool, typer.Option("--http/--no-http", help="Whether there is an HTTP API.")]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL|FLAGS",
        show_default=False,
        help="A model, if not --model; and any flags of the engine or the frontend, which "
        "`octavo engine --help` and `octavo frontend --help` list.",
    ),
]
EnginePort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="The first engine's port on loopback; 0 takes free ones."),
]


def serve(  # noqa: PLR0913  a parameter is a flag
    *,
    words: Words = [],  # noqa: B006  typer copies it
    model: Annotated[
        list[str],
        typer.Option(
            help="Checkpoint folder in Hugging Face form, GGUF file, or OWNER/NAME[@REVISION] on "
            "the hub; the embedded model if absent. Several models share the card, by turns."
        ),
    ] = [],  # noqa: B006  typer copies it
    host: Annotated[str, typer.Option(help="Address the frontend listens on.")] = LOOPBACK,
    port: Port = DEFAULT_PORT,
    http_port: HttpPort = None,
    http: Http = True,
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
            help="Flag for the engine alone, such as --engine-arg=--log-level=debug, which the "
            "frontend has, too; repeatable."
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

    Flags of vLLM's server are taken or answered with ours: docs/from-vllm.md.

    Examples:
    - `octavo serve`

    - `octavo serve Qwen/Qwen3-0.6B --max-model-len 8192 --dtype bfloat16`

    - `octavo serve ~/models/qwen3-0.6b-q8_0.gguf`

    - `octavo serve ~/models/qwen3-0.6b --host 0.0.0.0 --http-port 9000`

    - `octavo serve --engines 2 --engine-arg=--log-level=warning`

    - `octavo serve --model Qwen/Qwen3-8B --model Qwen/Qwen3-4B --max-model-len 8192`

    - `octavo serve --frontend-arg="--tls-cert f.pem --tls-key f.key" --tls-ca ca.pem`
    """
    require_extras("engine", "frontend")
    if http_port is not None and not http:
        raise ServiceFailedError("--no-http and --http-port exclude each other", exit_code=2)
    try:
        division = divide_arguments(words, ServiceFlags.read(), models=model)
        options = ServeOptions(
            engine_words=_words(engine_arg),
            frontend_words=_words(frontend_arg),
            num_engines=engines,
            listen_flags=["--host", host, "--port", str(port)],
        )
        plan = plan_services(division, options)
    except (ServeFlagError, UsageError) as error:
        raise ServiceFailedError(str(error), exit_code=2) from None
    replace_standard_error()  # an unread line must not hold up the supervisor
    stack = plan_stack(
        host=host,
        port=port,
        engine_port=engine_port,
        engine_environments=plan.environments,
        engine_arguments=plan.engine_words,
        frontend_arguments=plan.frontend_words,
        tls=tls,
    )
    if plan.model_words:
        stack = with_models(stack, plan.model_words)
    check_tls(stack)
    if http:
        stack = with_http(stack, http_port)
    for line in [*division.remarks, *plan.remarks, *_port_remarks(stack, port, http_port)]:
        _report(line)
    supervisor = Supervisor(_report)
    asyncio.run(run_until_signalled(_serve(supervisor, stack, plan), supervisor.kill))


async def _serve(supervisor: Supervisor, stack: Stack, plan: ServePlan) -> None:
    try:
        if plan.names:
            await start_in_turn(
                supervisor, stack.engines, plan.names, level=plan.level, report=_report
            )
        else:
            # At the same time: each of them loads the model by itself.
            await asyncio.gather(*map(supervisor.start, stack.engines))
        await supervisor.start(stack.frontend)
        for line in closing_lines(stack, *plan.names[:1]):
            _report(line)
        await supervisor.watch()
    finally:
        _report("stopping")
        await supervisor.stop()
        _report("stopped")


def _port_remarks(stack: Stack, port: int, wanted: int | None) -> Iterator[str]:
    """Yields a line where HTTP, of which the user has named no port, is not where one expects."""
    chosen = http_port_of(stack)
    if wanted is not None or chosen is None:
        return
    if port not in (0, DEFAULT_PORT):
        yield f"--port {port} is gRPC's; HTTP is on port {chosen}, which --http-port can change"
    elif chosen != HTTP_PORT:
        yield f"port {HTTP_PORT} is taken: HTTP is on port {chosen}"


def _report(line: str) -> None:
    echo(line, err=True)


def _words(arguments: list[str]) -> list[str]:
    """Splits "--flag value" given as one argument, the way a shell would.

    Raises:
        ServeFlagError: a quotation has no end.
    """
    try:
        return [word for argument in arguments for word in shlex.split(argument)]
    except ValueError as error:
        raise ServeFlagError(f"{' '.join(arguments)}: {error}") from None
