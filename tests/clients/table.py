"""Writes the tables of docs/clients.md, each from its own runs."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.clients.environments import ROOT
from tests.clients.trial import Report

PAGE = ROOT / "docs" / "clients.md"
_COLUMNS = """\
| client | version | what is tried | result |
|---|---|---|---|
"""
_HEAD = """\
# Clients

`scripts/test --clients` starts both services with the embedded model, drives them with the clients
below, each in its default settings and in an environment of its own, and writes this table. A row
is one trial. [Coding agents](#agents) and [newest releases](#newest-releases) are below.

"""
_AGENTS_HEAD = """\
## Agents

`scripts/try_clients` installs the newest release of each agent into a folder of its own and starts
the frontend and an engine with a scripted model. The agent gets the URL, a key and the model's
name, and is asked to write a word to a file. The model calls the agent's own tool that runs
commands, reads the result and says that it is done; then the agent is asked once more in the same
conversation. A turn works if the agent exits with 0, the file is there and it shows the model's
last words. Claude Code and Codex also show a picture to a model that sees images: the one by its
tool that reads files, the other with the question. The settings of each agent are in
`tests/clients/agents.toml`: what to copy into your own.

![Claude Code does the task](agent-claude-code.svg)

![Codex does the task](agent-codex.svg)

"""
_NEWEST_HEAD = """\
## Newest releases

`scripts/try_clients` also runs the trials of the first table with each client's newest release.

"""


def write(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the table of clients and leaves the others."""
    _replace(_HEAD + rows(reports), page)


def write_agents(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the table of agents and leaves the others."""
    _replace(_AGENTS_HEAD + rows(reports), page)


def write_newest(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the table of newest SDKs and frameworks and leaves the others."""
    _replace(_NEWEST_HEAD + rows(reports), page)


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


def _replace(section: str, page: Path) -> None:
    """Writes a section in place of the one with its heading, or at the end of the page."""
    before = page.read_text() if page.is_file() else ""
    sections = {_heading(each): each for each in re.split(r"(?m)^(?=##? )", before) if each}
    sections[_heading(section)] = section
    page.write_text("\n\n".join(each.strip() for each in sections.values()) + "\n")


def _heading(section: str) -> str:
    return section.partition("\n")[0]


def _shown(error: str | None) -> str:
    return "works" if error is None else error.replace("|", "\\|").replace("\n", " ")
