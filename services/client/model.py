"""Brings a model to this machine before services start, with progress in the terminal."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from services.client.console import TerminalConsole
from services.client.service_flags import read_flags
from services.hub.names import HubName, hub_name
from services.settings.installation import require_extras

LINE_INTERVAL_S = 5.0
"""Time between two lines of progress where standard error is no terminal."""


def engine_flags(model: str | None, engine_words: Sequence[str] = ()) -> list[str]:
    """Returns an engine's flags for a model, after fetching it if it is a name on the hub.

    The engines get its folder, so that a restart needs no hub.

    Args:
        model: a folder, a GGUF file or a name on the hub; None means the embedded model.
        engine_words: other flags of the engine, which may name a GGUF file of the hub's.

    Raises:
        HubError: the model cannot be fetched.
        MissingExtraError: huggingface_hub is not installed.
    """
    if model is None:
        return []
    name = hub_name(model)
    if name is None:
        return ["--model", model]
    default = os.environ.get("OCTAVO_ENGINE_GGUF_FILE", "")
    found = read_flags(engine_words, "engine", gguf_file=(str, default))
    path = pull(name, gguf_file=found.gguf_file)
    return ["--model", str(path), "--served-model-name", name.repository]


def pull(name: HubName, *, gguf_file: str = "") -> Path:
    """Returns the folder of a model of the hub, or its GGUF file, after fetching what it lacks.

    Raises:
        HubError: the model cannot be fetched.
        MissingExtraError: huggingface_hub is not installed.
    """
    require_extras("engine")
    from services.hub.fetch import fetch  # takes a while to import

    with _Shown(str(name)) as shown:
        return fetch(name, gguf_file=gguf_file, report=shown.report)


class _Shown:
    """Shows progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._console = TerminalConsole(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(model, total=None)
        self._said_s = time.monotonic()

    def __enter__(self) -> "_Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def report(self, num_bytes: int, total_bytes: int) -> None:
        """Takes the progress from any thread."""
        self._bar.update(self._task, completed=num_bytes, total=total_bytes)
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._said_s >= LINE_INTERVAL_S:
            self._said_s = now_s
            done = f"{num_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
            self._console.print(f"{self._model}: {done}", highlight=False, soft_wrap=True)
