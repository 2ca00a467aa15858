"""Reports the progress of a download."""

import io
import threading
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

Report = Callable[[int, int], None]
"""Takes the bytes that are here and the bytes in all, from any thread."""


def bar_class(report: Report, total_bytes: int) -> type[tqdm]:
    """Returns a class for progress bars of huggingface_hub, which add up and draw nothing."""
    bytes_of: dict[int, int] = {}
    lock = threading.Lock()

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no thread that draws

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "mininterval": 0.1})

        def display(self, *_: Any, **__: Any) -> None:
            """Reports instead of drawing."""
            with lock:
                bytes_of[id(self)] = int(self.n)
                report(sum(bytes_of.values()), total_bytes)

    return Bar
