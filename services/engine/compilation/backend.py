"""The torch.compile backend: splits a traced model and compiles the pieces."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import fx
from torch.fx import GraphModule

from services.engine.compilation.compiler_manager import CompilerManager
from services.engine.compilation.debug_dump import DebugDump
from services.engine.compilation.passes.manager import PostGradPassManager
from services.engine.compilation.piece_info import PieceInfo, PieceWrapper
from services.engine.compilation.piecewise_backend import PiecewiseBackend
from services.engine.compilation.split_graph import SplitItem, split_graph

log = structlog.get_logger()


class PiecewiseCompileInterpreter(fx.Interpreter):
    """Walks a split graph with its traced inputs and replaces each part by a compiled piece."""

    def __init__(
        self,
        whole: GraphModule,
        items: Sequence[SplitItem],
        *,
        manager: CompilerManager,
        compile_sizes: Sequence[int],
        piece_wrapper: PieceWrapper | None,
        dump: DebugDump | None,
    ) -> None:
        super().__init__(whole)
        self._whole = whole
        self._items = {item.submod_name: item for item in items}
        self._piece_names = [item.submod_name for item in items if not item.is_splitting_graph]
        self._manager = manager
        self._compile_sizes = compile_sizes
        self._wrap = piece_wrapper
        self._dump = dump

    def compile(self) -> None:
        """Compiles the pieces and inserts them into the split graph."""
        placeholders = self._whole.graph.find_nodes(op="placeholder")
        self.run(*(node.meta["example_value"] for node in placeholders))

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compiles one part for its inputs; returns its traced outputs."""
        assert not kwargs, "split_module passes inputs in order"
        item = self._items[target]
        if item.is_splitting_graph:
            run: Callable[..., Any] = item.graph.forward
        else:
            run = self._compile(item, args)
        # An attribute of the instance goes before the submodule of the same name, and a plain
        # function is called faster than a module.
        self._whole.__dict__[target] = run
        outputs: Any = item.graph.graph.output_node().args[0]
        return fx.node.map_arg(outputs, lambda node: node.meta["example_value"])

    def _compile(self, item: SplitItem, args: Sequence[Any]) -> Callable[..., Any]:
        info = PieceInfo(
            name=item.submod_name,
            index=self._piece_names.index(item.submod_name),
            num_pieces=len(self._piece_names),
        )

        def compile_piece() -> PiecewiseBackend:
            return PiecewiseBackend(
                item.graph,
                args,
                manager=self._manager,
                compile_sizes=self._compile_sizes,
            )

        piece = self._dump.piece(item, compile_piece) if self._dump else compile_piece()
        return piece if self._wrap is None else self._wrap(piece, info)


class OctavoBackend:
    """A torch.compile backend for one model; it can be called once.

    It does not run the graph: the caller of torch.compile uses `whole`.
    """

    def __init__(
        self,
        manager: CompilerManager,
        *,
        splitting_ops: Sequence[str],
        compile_sizes: Sequence[int] = (),
        piece_wrapper: PieceWrapper | None = None,
        debug_dump_path: Path | None = None,
        passes: PostGradPassManager | None = None,
    ) -> None:
        self._manager = manager
        self._splitting_ops = splitting_ops
        self._compile_sizes = compile_sizes
        self._piece_wrapper = piece_wrapper
        self._dump = DebugDump(debug_dump_path) if debug_dump_path else None
        self._passes = passes or PostGradPassManager(())
        self.graph: GraphModule | None = None
        """The traced graph."""
        self.whole: Callable[..., Sequence[Any]] | None = None
        """Runs the compiled model on the inputs of `graph`, in order."""
        self.traced_call: TracedCall | None = None
        """Replaces the graph while Dynamo traces."""
        self.items: list[SplitItem] = []
        """The parts of the graph."""
        self.pass_matches: Mapping[str, int] = {}
        """Matches of each compiler pass, by name."""

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> "TracedCall":
        """Compiles a traced model; returns a stand-in for it while Dynamo traces."""
        del example_inputs  # the graph's metadata has them
        if self.graph is not None:
            raise RuntimeError(
                "the model was traced a second time; a backend compiles one model for one trace"
            )
        self.graph = graph
        if self._dump:
            self._dump.graph("traced_graph", graph)
        self.pass_matches = self._passes.run(graph, self._dump)
        whole, self.items = split_graph(graph, self._splitting_ops)
        if self._dump:
            self._dump.graph("split_graph", whole)
        PiecewiseCompileInterpreter(
            whole,
            self.items,
            manager=self._manager,
            compile_sizes=self._compile_sizes,
            piece_wrapper=self._piece_wrapper,
            dump=self._dump,
        ).compile()
        self.whole = whole.forward
        self.traced_call = TracedCall(graph)
        return self.traced_call


class TracedCall:
    """Replaces a compiled graph while it is traced, and keeps its arguments.

    It returns empty tensors: tracing has no cache and no forward context to run the model.
    """

    def __init__(self, graph: GraphModule) -> None:
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list)), "Dynamo's graphs return a tuple"
        self.num_outputs = len(outputs)
        self.args: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Keeps the arguments; returns an empty tensor for each output."""
        self.args = args
        return (torch.empty(0),) * self.num_outputs
