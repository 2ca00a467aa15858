"""Makes the code of a program's parts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from services.engine.compilation.pieces.compiler_interface import with_direct_calls
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.pieces.piecewise_backend import PiecewiseBackend
from services.engine.compilation.program.compile_range import ANY_TOKENS, CompileRange
from services.engine.compilation.program.piece_code import PieceCode
from services.engine.compilation.program.piece_info import PieceInfo, PieceWrapper
from services.engine.compilation.program.program import Program
from services.engine.compilation.program.split_graph import SplitItem

if TYPE_CHECKING:
    from services.engine.compilation.program.debug_dump import DebugDump


class MissingPieceError(Exception):
    """A compiled piece of a kept program is not on disk."""


class PieceCompiler:
    """Compiles the pieces of programs, those with one graph once, and wraps each."""

    def __init__(
        self,
        manager: CompilerManager,
        *,
        compile_sizes: Sequence[int] = (),
        piece_wrapper: PieceWrapper | None = None,
        dump: "DebugDump | None" = None,
    ) -> None:
        """Starts without pieces.

        Args:
            manager: compiles graphs or finds compiled ones.
            compile_sizes: numbers of tokens with kernels of their own.
            piece_wrapper: wraps each piece.
            dump: receives the graphs and the generated code.
        """
        self._manager = manager
        self._compile_sizes = compile_sizes
        self._wrap = piece_wrapper
        self._dump = dump
        self._pieces: dict[nn.Module, Callable[..., Any]] = {}

    def compile(
        self, program: Program, compile_range: CompileRange = ANY_TOKENS
    ) -> dict[str, Callable[..., Any]]:
        """Returns the code of each part, by its name; splitting operators run as they are.

        Args:
            program: its graphs belong to no other program.
            compile_range: numbers of tokens that it runs.
        """
        runs: dict[str, Callable[..., Any]] = {}
        index = 0
        for part in program.parts:
            item = part.item
            if item.is_splitting_graph:
                runs[item.submod_name] = (
                    item.graph.forward
                    if isinstance(item.graph, PieceCode)
                    else with_direct_calls(item.graph).forward
                )
                continue
            piece: Callable[..., Any] = self._piece(item, compile_range)
            if self._wrap is not None:
                info = PieceInfo(name=item.submod_name, index=index, num_pieces=program.num_pieces)
                piece = self._wrap(piece, info)
            runs[item.submod_name] = piece
            index += 1
        return runs

    def _piece(self, item: SplitItem, compile_range: CompileRange) -> Callable[..., Any]:
        piece = self._pieces.get(item.graph)
        if piece is None:

            def compile_piece() -> Callable[..., Any]:
                return self._compile(item, compile_range)

            dump = self._dump
            piece = (
                dump.of_range(compile_range).piece(item, compile_piece) if dump else compile_piece()
            )
            self._pieces[item.graph] = piece
        return piece

    def _compile(self, item: SplitItem, compile_range: CompileRange) -> Callable[..., Any]:
        if isinstance(item.graph, PieceCode):
            return self._find(item.graph, compile_range)
        placeholders = item.graph.graph.find_nodes(op="placeholder")
        return PiecewiseBackend(
            item.graph,
            [node.meta["example_value"] for node in placeholders],
            manager=self._manager,
            compile_range=compile_range,
            compile_sizes=self._compile_sizes,
        )

    def _find(self, code: PieceCode, compile_range: CompileRange) -> Callable[..., Any]:
        """Returns the compiled piece of a kept program, or its code if there is none to compile."""
        if code.signature is None or not self._manager.compiles:
            forward: Callable[..., Any] = code.forward
            return forward
        compiled = self._manager.find(code.signature, compile_range.typical)
        if compiled is None:
            raise MissingPieceError(f"a piece is not in the cache: {code.signature}")
        run = compiled
        return (lambda *args: run(*args)[0]) if code.has_one_output else run
