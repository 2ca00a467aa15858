"""Writes docs/clients.md from runs: the table of clients from one, that of agents from another."""

from collections.abc import Sequence
from pathlib import Path

from tests.clients.environments import ROOT
from tests.clients.trial import Report

PAGE = ROOT / "docs" / "clients.md"
_AGENTS = "## Agents\n"
_COLUMNS = """\
| client | version | what is tried | result |
|---|---|---|---|
"""
_HEAD = """\
# Clients

`scripts/test --clients` starts both services with the embedded model, drives them with the clients
below, each in its default settings and in an environment of its own, and writes this table. A row
is one trial. [Coding agents](#agents) are below.

"""
_AGENTS_HEAD = f"""\
{_AGENTS}
`scripts/try_clients` installs the newest release of each agent into a folder of its own and starts
the frontend and an engine with a scripted model. The agent gets the URL, a key and the model's
name, and is asked to write a word to a file. The model calls the agent's own tool that runs
commands, reads the result and says that it is done; then the agent is asked once more in the same
conversation. A turn works if the agent exits with 0, the file is there and it shows the model's
last words. The settings of each agent are in `tests/clients/agents.toml`: what to copy into your
own.

![Claude Code does the task](agent-claude-code.svg)

![Codex does the task](agent-codex.svg)

"""


def write(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the table of clients and leaves that of agents."""
    _, heading, agents = _text(page).partition(_AGENTS)
    page.write_text(_HEAD + rows(reports) + (f"\n{heading}{agents}" if heading else ""))


def write_agents(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the table of agents and leaves that of clients and what follows a later heading."""
    clients, _, agents = _text(page).partition(_AGENTS)
    _, heading, after = agents.partition("\n## ")
    rest = f"{heading}{after}" if heading else ""
    page.write_text(f"{clients.rstrip()}\n\n{_AGENTS_HEAD}{rows(reports)}{rest}")


def rows(reports: Sequence[Report]) -> str:
    """Returns the table of reports."""
    lines = [
        f"| {report.package} | {report.version} | {what} | {_shown(error)} |"
        for report in reports
        for what, error in report.trials
    ]
    return _COLUMNS + "\n".join(lines) + "\n"


def picture_of(name: str) -> Path:
    """Returns the picture of an agent's screen."""
    return PAGE.with_name(f"agent-{name.replace('_', '-')}.svg")


def _text(page: Path) -> str:
    return page.read_text() if page.is_file() else ""


def _shown(error: str | None) -> str:
    return "works" if error is None else error.replace("|", "\\|").replace("\n", " ")
