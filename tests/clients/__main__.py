"""Tries the newest clients and writes their tables, for scripts/try_clients."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.clients import table
from tests.clients.agents import AGENTS, MODELS, AgentAt, scripted_services, try_agent
from tests.clients.environments import (
    CLIENTS,
    NotInstallableError,
    Program,
    driver_of,
    newest_program,
)
from tests.clients.screens import draw_agent
from tests.clients.trial import Report
from tests.clients.vector_services import vector_services
from tests.support.processes import free_port, stack


def try_agents(names: Sequence[str], templates: Sequence[str], *, installs: bool) -> list[Report]:
    """Returns a report of each agent; all of them talk to the same services."""
    reports = {name: Report(_package(name)) for name in names}
    programs: dict[str, Program] = {}
    for name, report in reports.items():
        _say(f"{name}: installing")
        try:
            programs[name] = newest_program(name, AGENTS[name], installs=installs)
        except NotInstallableError as error:
            report.trials.append(("installing it", f"cannot be installed: {error}"))
    for template in templates:
        with scripted_services(template) as served, tempfile.TemporaryDirectory() as folder:
            for name, program in programs.items():
                try_agent(reports[name], name, program, served, Path(folder) / name)
                _print_last(reports[name])
    return list(reports.values())


def try_drivers(names: Sequence[str]) -> list[Report]:
    """Returns a report of each SDK or framework, in its newest release, with the embedded model."""
    reports, port = [], free_port()
    with (
        stack(frontend={"http_port": port}),
        vector_services() as vector_urls,
        tempfile.TemporaryDirectory() as home,
    ):
        for name in names:
            _say(f"{name}: installing its newest release and running its driver")
            report = Report(name)
            with report.trial("its driver"):
                driver = driver_of(name, newest=True)
                report = driver.report(
                    f"http://127.0.0.1:{port}",
                    TINY_CHECKPOINT.name,
                    Path(home),
                    TOKENIZER=str(TINY_CHECKPOINT),
                    **vector_urls,
                )
            reports.append(report)
    return reports


def draw_screens(names: Sequence[str]) -> None:
    """Draws agents that do the task on their screens into docs/agent-NAME.svg."""
    with scripted_services("reasons") as served, tempfile.TemporaryDirectory() as folder:
        for name in names:
            program = newest_program(name, AGENTS[name], installs=False)
            agent = AgentAt(name, program, served.url, Path(folder) / name)
            draw_agent(agent, f"{program.path.name} {program.version}", table.picture_of(name))


def _package(name: str) -> str:
    return str(AGENTS[name].get("npm") or AGENTS[name]["packages"])


def _print_last(report: Report) -> None:
    for what, error in report.trials[-3:]:
        _say(f"{report.package} {report.version}, {what}: {error or 'works'}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Tries the clients that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/try_clients", description=__doc__)
    every = ", ".join([*AGENTS, *CLIENTS])
    parser.add_argument("clients", nargs="*", help=f"some of {every}; all if none")
    parser.add_argument("--template", choices=MODELS, help="one kind of model instead of three")
    parser.add_argument("--installed", action="store_true", help="tries agents as installed")
    parser.add_argument("--screens", action="store_true", help="draws screens of installed ones")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(AGENTS) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.screens:
        draw_screens([name for name, agent in AGENTS.items() if "screen" in agent])
        return 0
    clients = options.clients or [*AGENTS, *([] if options.installed else CLIENTS)]
    templates = [options.template] if options.template else list(MODELS)
    agents = [name for name in clients if name in AGENTS]
    of_agents = try_agents(agents, templates, installs=not options.installed) if agents else []
    drivers = [name for name in clients if name in CLIENTS]
    of_drivers = try_drivers(drivers) if drivers else []
    if not options.clients and not options.template:
        table.write_agents(of_agents)
        if drivers:
            table.write_newest(of_drivers)
    reports = [*of_agents, *of_drivers]
    sys.stdout.write(f"\n{table.rows(reports)}")
    return int(any(error for report in reports for _, error in report.trials))


if __name__ == "__main__":
    sys.exit(main())
