"""Tries coding agents and writes their table, for scripts/try_clients."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients import table
from tests.clients.agents import AGENTS, MODELS, AgentAt, scripted_services, try_agent
from tests.clients.environments import NotInstallableError, Program, newest_program
from tests.clients.screens import draw_agent
from tests.clients.trial import Report


def try_agents(names: Sequence[str], templates: Sequence[str], *, installs: bool) -> list[Report]:
    """Returns a report of each agent; all of them talk to the same services."""
    reports = {name: Report(_package(name)) for name in names}
    programs: dict[str, Program] = {}
    for name, report in reports.items():
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
        sys.stdout.write(f"{report.package} {report.version}, {what}: {error or 'works'}\n")
    sys.stdout.flush()


def main() -> int:
    """Tries the agents that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/try_clients", description=__doc__)
    parser.add_argument("agents", nargs="*", help=f"some of {', '.join(AGENTS)}; all if none")
    parser.add_argument("--template", choices=MODELS, help="one kind of model instead of three")
    parser.add_argument("--installed", action="store_true", help="installs nothing")
    parser.add_argument(
        "--screens", action="store_true", help="draws the screens, of installed ones"
    )
    options = parser.parse_args()
    if unknown := set(options.agents) - set(AGENTS):
        parser.error(f"unknown agents: {', '.join(sorted(unknown))}")
    if options.screens:
        draw_screens([name for name, agent in AGENTS.items() if "screen" in agent])
        return 0
    templates = [options.template] if options.template else list(MODELS)
    reports = try_agents(options.agents or list(AGENTS), templates, installs=not options.installed)
    sys.stdout.write(f"\n{table.rows(reports)}")
    if not options.agents and not options.template:
        table.write_agents(reports)
    return int(any(error for report in reports for _, error in report.trials))


if __name__ == "__main__":
    sys.exit(main())
