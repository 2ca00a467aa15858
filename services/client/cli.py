"""The `octavo` command line: the entry point, whose commands are beside it."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from services.client.commands import lora, profile, weights
from services.client.commands.bench import bench_compare, bench_serving
from services.client.commands.chat import chat
from services.client.commands.demo import demo
from services.client.commands.generate import generate
from services.client.commands.graphs import graphs
from services.client.commands.graphs_plan import plan
from services.client.commands.health import health
from services.client.commands.models import models
from services.client.commands.pull import pull
from services.client.commands.record import record
from services.client.commands.serve import serve
from services.client.commands.services import engine, explain, frontend, replay, worker_node
from services.client.commands.sleep import sleep, wake
from services.client.commands.stats import stats
from services.client.commands.tokenize import tokenize
from services.client.commands.vectors import embed, rerank
from services.client.commands.why import why
from services.client.console import echo
from services.client.errors import OctavoError, UnavailableError, UnsupportedError
from services.client.flags import expand_dataclasses
from services.client.supervisor import ServiceFailedError
from services.hub.names import HubError
from services.processes.standard_output import checked_output
from services.settings.installation import MissingExtraError, own_version

app = typer.Typer(
    name="octavo",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="""Serves language models as two gRPC services, and talks to them.

    `octavo serve` starts both services with the embedded model; then, in another terminal, try
    `octavo chat`. Addresses come from --frontend and --engine, or from the environment variables
    OCTAVO_FRONTEND and OCTAVO_ENGINE; OCTAVO_TLS_CA, OCTAVO_TLS_CERT, OCTAVO_TLS_KEY and
    OCTAVO_API_KEY_FILE say how to be let in.
    """,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        echo(f"octavo {own_version()}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Takes the options that come before any command."""


_panels: dict[str, tuple[Callable[..., None], ...]] = {
    "Talk to a model": (chat, generate, embed, rerank, tokenize, models),
    "Run the services": (demo, pull),
    "Look after them": (stats, why, health, record, sleep, wake),
}
for _panel, _commands in _panels.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(expand_dataclasses(_command))
app.command(
    rich_help_panel="Run the services",
    context_settings={"ignore_unknown_options": True},  # they are the services'
)(expand_dataclasses(serve))
for _service, _panel in (
    (engine, "Run the services"),
    (frontend, "Run the services"),
    (worker_node, "Run the services"),
    (replay, "Look after them"),
):
    app.command(
        rich_help_panel=_panel,
        # Every flag, --help too, is the service's own.
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(_service)
_bench = typer.Typer(no_args_is_help=True, help="Measures the services, and compares results.")
_bench.command("serving")(expand_dataclasses(bench_serving))
_bench.command("compare")(bench_compare)
app.add_typer(_bench, name="bench", rich_help_panel="Look after them")

_graphs = typer.Typer(invoke_without_command=True)
_graphs.callback()(expand_dataclasses(graphs))
_graphs.command("plan")(expand_dataclasses(plan))
app.add_typer(_graphs, name="graphs", rich_help_panel="Look after them")

_profile = typer.Typer(no_args_is_help=True, help="Traces what the engine's worker does.")
_profile.command("start")(expand_dataclasses(profile.start))
_profile.command("stop")(expand_dataclasses(profile.stop))
app.add_typer(_profile, name="profile", rich_help_panel="Look after them")

_lora = typer.Typer(no_args_is_help=True, help="Adds, removes and lists adapters of the model.")
_lora.command("add")(expand_dataclasses(lora.add))
_lora.command("remove")(expand_dataclasses(lora.remove))
_lora.command("list")(expand_dataclasses(lora.list_adapters))
app.add_typer(_lora, name="lora", rich_help_panel="Look after them")
_weights = typer.Typer(no_args_is_help=True, help="Replaces the model's weights while it serves.")
_weights.command("update")(expand_dataclasses(weights.update))
_weights.command("show")(expand_dataclasses(weights.show))
app.add_typer(_weights, name="weights", rich_help_panel="Look after them")

_cache = typer.Typer(no_args_is_help=True, help="Looks after what the engine has compiled.")
_cache.command(
    "explain",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(explain)
app.add_typer(_cache, name="cache", rich_help_panel="Look after them")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a failure is one line on standard error.

    Its exit code is 1, or that of a service that failed.

    Args:
        arguments: what to run instead of the process's own arguments.
    """
    try:
        with checked_output("octavo"):
            app(args=arguments)
    except OctavoError as error:
        _fail(f"{error}{_hint(error)}")
    except ServiceFailedError as error:
        _fail(str(error), error.exit_code)
    except (HubError, MissingExtraError) as error:
        _fail(str(error))


def _hint(error: OctavoError) -> str:
    """Returns what a user may do about an error, where that is not plain from its message."""
    if isinstance(error, UnavailableError) and "cannot connect" in str(error):
        return " (`octavo serve` starts both services)"
    if isinstance(error, UnavailableError) and "answer in gRPC" in str(error):
        return " (`octavo serve` shows gRPC's address, which is not HTTP's; --tls-ca is for TLS)"
    if isinstance(error, UnsupportedError):
        return " (--frontend takes the frontend's address, --engine the engine's)"
    return ""


def _fail(message: str, exit_code: int = 1) -> None:
    echo(f"octavo: {message}", fg=typer.colors.RED, err=True)
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
