"""Writes docs/clients.md from a run."""

from collections.abc import Sequence
from pathlib import Path

from tests.clients.environments import ROOT
from tests.clients.trial import Report

PAGE = ROOT / "docs" / "clients.md"
_HEAD = """\
# Clients

`scripts/test --clients` starts both services with the embedded model, drives them with the clients
below, each in its default settings and in an environment of its own, and writes this page. A row
is one trial.

| client | version | what is tried | result |
|---|---|---|---|
"""


def write(reports: Sequence[Report], page: Path = PAGE) -> None:
    """Writes the page."""
    rows = [
        f"| {report.package} | {report.version} | {what} | {_shown(error)} |"
        for report in reports
        for what, error in report.trials
    ]
    page.write_text(_HEAD + "\n".join(rows) + "\n")


def _shown(error: str | None) -> str:
    return "works" if error is None else error.replace("|", "\\|").replace("\n", " ")
