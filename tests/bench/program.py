"""The begin, the limit of time and the end of programs that measure a whole engine."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import uvloop

from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.worker.rank_process import WorkerDiedError
from tests.bench.offline_engine import EngineFailedError
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, read_settings

GRACE_S = 30
"""Time beyond the budget that what has begun may take."""


@contextmanager
def reported(
    program: str,
    parser: argparse.ArgumentParser,
    *,
    defaults: Mapping[str, object] = PEER_SETTINGS,
) -> Iterator[tuple[Settings, Report]]:
    """Reads the command line and opens the report; a shape's folder lives as long."""
    with TemporaryDirectory(prefix="octavo-bench-") as folder:
        settings = read_settings(parser, Path(folder), defaults=defaults)
        yield (
            settings,
            Report(
                program,
                path=settings.arguments.out,
                shape=settings.shape,
                settings=settings.engine_settings(),
                commit_name=settings.arguments.commit,
            ),
        )


def run_program(
    program: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[Settings, Report], Awaitable[None]],
    *,
    defaults: Mapping[str, object] = PEER_SETTINGS,
) -> NoReturn:
    """Measures within the budget and prints the table; what failed is in the report."""
    with reported(program, parser, defaults=defaults) as (settings, report):
        uvloop.run(_within_budget(measure, settings, report))
    print_report(report)
    raise SystemExit(0 if report.figures else 1)


def print_report(report: Report) -> None:
    """Prints the figures and the facts."""
    print(report.table())
    for name, value in report.content["facts"].items():
        print(f"{name}: {value}")


async def _within_budget(
    measure: Callable[[Settings, Report], Awaitable[None]], settings: Settings, report: Report
) -> None:
    try:
        async with asyncio.timeout(settings.budget.left_s + GRACE_S):
            await measure(settings, report)
    except TimeoutError:
        report.problem("the rest: out of time")
    except (WorkerDiedError, EngineFailedError, ModelFolderError) as error:
        report.problem(str(error))
