"""Keeps the history of step sizes in its file."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from services.engine.batch import GraphKind
from services.engine.capture_sizes.history import history_path, load_history, save_history
from services.engine.config.engine_config import EngineConfig
from services.engine.core.graph_ledger import GraphLedger

INTERVAL_S = 60.0
"""Time between two writes, which take 1 ms, or 10 ms with 8192 sizes."""


class SavedHistory:
    """The sizes of the steps of this run and of earlier ones, and their file."""

    def __init__(self, config: EngineConfig, graphs: Callable[[], GraphLedger]) -> None:
        """Reads the file, if there is one; `graphs` returns those of the present worker."""
        self.steps = load_history(config)
        """The sizes, which the step loop counts."""
        self._graphs = graphs
        self._path = history_path(config)
        self._num_saved = self.steps.num_steps

    async def save_regularly(self) -> NoReturn:
        """Saves new steps until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.save()

    def save(self) -> None:
        """Writes the history if it has a file and new steps."""
        history, graphs = self.steps, self._graphs()
        num_steps = history.num_steps
        if self._path is None or num_steps == self._num_saved:
            return
        if graphs.captured:
            history.cudagraph_mode = graphs.mode
            history.decode_graphs = graphs.costs(GraphKind.GRAPH_KIND_DECODE)
            history.piece_graphs = graphs.costs(
                GraphKind.GRAPH_KIND_MIXED, GraphKind.GRAPH_KIND_PIECEWISE
            )
        if save_history(history, self._path):
            self._num_saved = num_steps
