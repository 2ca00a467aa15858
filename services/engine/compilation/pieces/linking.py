"""Makes a forward pass of a traced model and the code of its parts."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.engine.compilation.pieces.compiler_interface import EagerAdaptor
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.linked_program import (
    AdapterForward,
    LinkedProgram,
    RangedForward,
)
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.compilation.program.traced_model import Programs, TracedModel

if TYPE_CHECKING:
    from services.engine.compilation.program.debug_dump import DebugDump

Forward = Callable[..., Any]


def run_as_traced(traced: TracedModel) -> Forward:
    """Returns a traced model's forward, not compiled."""
    return link(traced, PieceCompiler(CompilerManager(EagerAdaptor(), {})))


def link(traced: TracedModel, compiler: PieceCompiler, dump: "DebugDump | None" = None) -> Forward:
    """Compiles a traced model's pieces and returns its forward."""

    def forward_of(programs: Programs, name: str) -> Forward:
        forwards: list[tuple[int, Forward]] = []
        for compile_range, program in programs:
            linked = LinkedProgram(program, compiler.compile(program, compile_range), traced.layers)
            if dump:
                dump.of_range(compile_range).graph(name, linked.graph)
            forwards.append((compile_range.end, linked))
        return forwards[0][1] if len(forwards) == 1 else RangedForward(forwards)

    forward = forward_of(traced.programs, "split_graph")
    if not traced.adapter_free:
        return forward
    return AdapterForward(forward, forward_of(traced.adapter_free, "split_graph_without_adapters"))
