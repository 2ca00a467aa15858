"""`octavo graphs plan`: the best capture sizes for the steps that an engine has seen."""

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from services.client.channel import Tls
from services.client.commands.stats import stats_of
from services.client.flags import DEFAULT_ENGINE, EngineAddress
from services.processes.child import child_command


def plan(
    *,
    histogram: Annotated[
        Path | None,
        typer.Option(help="A file of the engine's histogram folder, instead of a running engine."),
    ] = None,
    num_graphs: Annotated[
        int | None,
        typer.Option(min=1, help="Most graphs of each kind; as many as today if absent."),
    ] = None,
    memory_mb: Annotated[
        float | None, typer.Option(min=0, help="Most MiB for the graphs of each kind.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one line of JSON.")
    ] = False,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Shows today's capture sizes beside the best ones for the steps that were seen.

    Steps of earlier runs count too.

    Examples:
    - `octavo graphs plan`

    - `octavo graphs plan --num-graphs 12`
    """
    arguments = ["graphs", "plan", *(["--json"] if as_json else [])]
    if num_graphs is not None:
        arguments += ["--num-graphs", str(num_graphs)]
    if memory_mb is not None:
        arguments += ["--memory-mb", str(memory_mb)]
    stats = b""
    if histogram is not None:
        arguments += ["--histogram", str(histogram)]
    else:
        stats = stats_of(engine, tls, include_step_sizes=True).SerializeToString()
    # The planner is the engine's own: what it proposes is what `auto` takes.
    done = subprocess.run(child_command("services.engine", arguments), input=stats, check=False)
    raise typer.Exit(done.returncode)
