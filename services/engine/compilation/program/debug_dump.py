"""Writes traced graphs, pieces and generated code for a person to read."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
from torch._inductor.codecache import PyCodeCache
from torch.fx import GraphModule

from services.engine.compilation.program.compile_range import CompileRange
from services.engine.compilation.program.split_graph import SplitItem

_T = TypeVar("_T")

log = structlog.get_logger()


class DebugDump:
    """A folder with one model's graphs and the code generated for them.

    Code that several pieces share is written with the first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_range(self, compile_range: CompileRange) -> "DebugDump":
        """Returns where a range's graphs go: this folder for the first one, else one inside it."""
        if compile_range.start == 1:
            return self
        return DebugDump(self.folder / f"from_{compile_range.start}_tokens")

    def graph(self, name: str, graph: GraphModule) -> None:
        """Writes a graph as Python with the kind of every value."""
        self.write(f"{name}.py", graph.print_readable(print_output=False))

    def piece(self, item: SplitItem, compile_piece: Callable[[], _T]) -> _T:
        """Writes a piece, compiles it, and writes the generated code."""
        self.graph(item.submod_name, item.graph)
        num_before = len(PyCodeCache.modules)
        compiled = compile_piece()
        for index, module in enumerate(PyCodeCache.modules[num_before:]):
            if module.__file__ is not None:
                code = Path(module.__file__).read_text()
                self.write(f"{item.submod_name}_generated_{index}.py", code)
        return compiled

    def write(self, name: str, text: str) -> None:
        """Writes a file; on a full disk, for example, the file is absent and the log says why."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        except OSError as error:
            log.warning("debug_dump_not_written", name=name, error=str(error))
