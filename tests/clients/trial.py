"""Trials of a client and their results; needs the standard library alone.

A driver runs in the environment of its client: `python -m tests.clients.drivers.NAME URL MODEL`. It
prints its version and its trials as JSON in its last line.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

MAX_SHOWN = 300


@dataclass
class Report:
    """The trials of one client, in order, each with an error or None."""

    package: str
    version: str = ""
    trials: list[tuple[str, str | None]] = field(default_factory=list)

    @contextlib.contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """Notes whether the body succeeds; later trials are made whatever happens."""
        error = None
        try:
            yield
        except Exception as problem:  # noqa: BLE001  any failure is the result
            error = f"{type(problem).__name__}: {problem}"[:MAX_SHOWN]
        self.trials.append((what, error))

    def print(self) -> None:
        """Prints the report for the test that started the driver."""
        self.version = importlib.metadata.version(self.package)
        sys.stdout.write(f"\n{json.dumps(asdict(self))}\n")


def served() -> tuple[str, str]:
    """The base URL, with /v1, and the model's name."""
    _, url, model = sys.argv
    return url, model


def serving(task: str) -> str:
    """The base URL, without /v1, of services with --task embed or score and the same model."""
    return os.environ[f"{task.upper()}_URL"]


def check(is_right: object, told: object) -> None:
    """Raises ValueError with what the server answered, unless it is right."""
    if not is_right:
        raise ValueError(f"unexpected: {told}")
