"""Coding agents that do a small task with a scripted model, and do it again."""

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from tests.clients.environments import FOLDER, Program
from tests.clients.trial import Report, check
from tests.support.processes import ServiceProcess, free_port, start_engine, start_frontend
from tests.support.scripted_model import (
    CONTENT,
    DONE,
    DONE_AGAIN,
    FILE,
    LOOK,
    MODEL,
    PICTURE,
    SEEN,
    TASK,
)
from tests.support.vision import png

AGENTS: dict[str, Any] = tomllib.loads((FOLDER / "agents.toml").read_text())
MODELS: Mapping[str, str] = {
    "reasons": "a model that reasons",
    "plain": "a model that does not reason",
    "no_tools": "a model whose template has no tools",
    "sees": "a model that sees images",
}
"""Templates of the scripted model, as the table names them."""
TURN_TIMEOUT_S = 600
MAX_OUTPUT = 400
_KEPT = ("PATH", "LANG", "TERM")


class AgentFailedError(Exception):
    """An agent exited with an error or did not end; the message is the end of its output."""


@dataclass(frozen=True)
class Served:
    """A running frontend of the scripted model."""

    template: str
    frontend: ServiceProcess
    url: str


@contextmanager
def scripted_services(template: str) -> Iterator[Served]:
    """Starts an engine with the scripted model and a frontend."""
    port = free_port()
    engine = start_engine(module="tests.support.scripted_model", template=template)
    engine.start()  # it has no health; the frontend waits for it
    try:
        with start_frontend(engine.address, http_port=port) as frontend:
            yield Served(template, frontend, f"http://127.0.0.1:{port}")
    finally:
        engine.stop()


def try_agent(report: Report, name: str, program: Program, served: Served, folder: Path) -> None:
    """Has an agent do the task and do it again, in an empty folder with an empty home."""
    agent = AgentAt(name, program, served.url, folder)
    report.version = program.version
    model, log_before = MODELS[served.template], len(served.frontend.log)
    if served.template == "sees":
        _try_to_look(report, agent, model)
        return
    with report.trial(f"{model}: a task"):
        agent.prepare()
        agent.do("first", DONE)
    if "again" in AGENTS[name] and report.trials[-1][1] is None:
        with report.trial(f"{model}: a second turn"):
            agent.do("again", DONE_AGAIN)
    with report.trial(f"{model}: no request is refused"):
        failures = failures_in(served.frontend.log[log_before:])
        check(not failures, "; ".join(failures))


def _try_to_look(report: Report, agent: "AgentAt", model: str) -> None:
    """Has an agent that can show pictures show one to the model."""
    if not agent.can_look:
        return
    with report.trial(f"{model}: a picture"):
        agent.prepare()
        agent.look()


def failures_in(log: str) -> list[str]:
    """Returns the requests that failed or were refused, as a frontend's log says them."""
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [
        " ".join(str(event[key]) for key in ("method", "error", "field") if key in event)
        for event in events
        if event["event"] == "request_failed"
    ]


class AgentAt:
    """An agent with a server, a home and a folder to work in."""

    def __init__(self, name: str, program: Program, url: str, folder: Path) -> None:
        self._settings = AGENTS[name]
        self._program = program
        self.home, self.work = folder / "home", folder / "work"
        folders = {"home": str(self.home), "work": str(self.work)}
        self._picture = self.work / PICTURE
        look = {"picture": str(self._picture), "look": LOOK.format(path=self._picture)}
        self._values = {"url": url, "model": MODEL, "task": TASK, **look, **folders}
        for each in (self.home, self.work):
            each.mkdir(parents=True)
        for path, text in self._settings.get("files", {}).items():
            file = self.home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._filled(text))

    def command(self, turn: str) -> list[str]:
        """Returns the command of a turn; turn: first, again, look or prepare."""
        return [str(self._program.path), *map(self._filled, self._settings[turn])]

    @property
    def environment(self) -> dict[str, str]:
        """All variables that the agent gets."""
        own = self._settings.get("environment", {})
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "HOME": str(self.home),
            **{name: self._filled(value) for name, value in own.items()},
        }

    def prepare(self) -> None:
        """Signs in, where an agent wants that before its first task."""
        if "prepare" in self._settings:
            self._run("prepare")

    def do(self, turn: str, done: str) -> None:
        """Has the agent do the task.

        Raises:
            AgentFailedError: it failed.
            ValueError: it made no such file, or did not say that it is done.
        """
        file = self.work / FILE
        if file.is_file():
            file.write_text("")
        output = self._run(turn)
        check(file.is_file() and file.read_text().strip() == CONTENT, f"no {FILE}: {_end(output)}")
        check(done in " ".join(output.split()), _end(output))

    @property
    def can_look(self) -> bool:
        """Whether it can show a picture without a screen."""
        return "look" in self._settings

    def look(self) -> None:
        """Has the agent show a picture.

        Raises:
            AgentFailedError: it failed.
            ValueError: the model did not see the picture in its size.
        """
        self._picture.write_bytes(png(64, 32))
        output = self._run("look")
        check(SEEN in " ".join(output.split()), _end(output))

    def _run(self, turn: str) -> str:
        try:
            result = subprocess.run(
                self.command(turn),
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TURN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = (error.output or b"").decode(errors="replace")
            raise AgentFailedError(f"no end in {TURN_TIMEOUT_S} s: {_end(said)}") from None
        if result.returncode:
            raise AgentFailedError(f"exit status {result.returncode}: {_end(result.stdout)}")
        return result.stdout

    def _filled(self, text: str) -> str:
        return Template(text).safe_substitute(self._values)


def _end(output: str) -> str:
    return " ".join(output.split())[-MAX_OUTPUT:]
