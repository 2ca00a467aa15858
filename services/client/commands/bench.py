"""`octavo bench`: latency and throughput under load, and results side by side."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from services.client.bench.compare import (
    ResultFileError,
    UnlikeLoadsError,
    check_loads,
    comparison,
    read_result,
)
from services.client.bench.report import report, table_of
from services.client.bench.runner import run
from services.client.bench.target import EngineTarget, FrontendTarget
from services.client.bench.workload import Load
from services.client.channel import Access
from services.client.console import TerminalConsole, echo
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, checked


def bench_serving(
    *,
    load: Load,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file, too.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            callback=checked, help="Send token ids to the engine at host:port, past the frontend."
        ),
    ] = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Sends a seeded load and reports time to first token, time between tokens and throughput.

    Without --rate, --concurrency requests run at all times (closed loop). With --rate, requests
    arrive at random times whether or not earlier ones are done (open loop, Poisson).

    Examples:
    - `octavo bench serving --num-requests 200 --concurrency 32`

    - `octavo bench serving --rate 10 --prompt-tokens 64-512 --output-tokens 128 --json run.json`

    - `octavo bench serving --engine 127.0.0.1:50051`
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"--json: there is no folder {json_file.parent}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(_bench(load, engine, frontend, access))
    TerminalConsole().print(table_of(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    for code, number in result["num_failed"].items():
        echo(f"{number} failed with {code}: {result['first_failure'][code]}", err=True)
    if result["num_failed"]:
        raise typer.Exit(1)


def bench_compare(
    first: Annotated[Path, typer.Argument(help="Result of a benchmark, as JSON.")],
    second: Annotated[Path, typer.Argument(help="Another one of the same benchmark and load.")],
    unlike: Annotated[
        bool, typer.Option("--unlike", help="Compare results of different loads all the same.")
    ] = False,
) -> None:
    """Prints the second result over the first, figure by figure, and what differs around them.

    Results of different loads, or of different benchmarks, are refused.

    Examples:
    - `octavo bench compare before.json after.json`
    """
    try:
        results = read_result(first), read_result(second)
        if not unlike:
            check_loads(*results)
    except ResultFileError as error:
        raise typer.BadParameter(str(error)) from None
    except UnlikeLoadsError as error:
        echo(f"octavo: {error} (--unlike compares them all the same)", err=True)
        raise typer.Exit(1) from None
    for line in comparison(*results):
        echo(line)


async def _bench(load: Load, engine: str | None, frontend: str, access: Access) -> dict[str, Any]:
    console = TerminalConsole(stderr=True)
    target = (
        FrontendTarget(frontend, load.seed, access)
        if engine is None
        else EngineTarget(engine, access.tls)
    )
    async with target:
        with console.status("running") as status:
            measured = await run(
                target,
                load,
                lambda done: status.update(f"{done} of {load.num_requests} requests done"),
            )
    return report(measured, load, target.name)
