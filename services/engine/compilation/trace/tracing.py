"""Traces a model and runs the passes."""

import copy
import operator
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import structlog
import torch
from torch import Tensor, nn
from torch.fx import Graph

from models.compile_support import expected_passes_of
from models.layers.decoder import CausalLM
from services.engine.compilation.passes.manager import PostGradPassManager
from services.engine.compilation.passes.selection import selected_passes
from services.engine.compilation.program.compile_range import CompileRange, compile_ranges
from services.engine.compilation.program.debug_dump import DebugDump
from services.engine.compilation.program.program import (
    CannotRepeatError,
    Trace,
    read_program,
    repeat_layers,
)
from services.engine.compilation.program.split_graph import num_calls
from services.engine.compilation.program.traced_model import Programs, TracedModel
from services.engine.compilation.trace.adapters import without_adapters
from services.engine.compilation.trace.backend import trace_model
from services.engine.compilation.trace.layer_kinds import kind_of, layers_to_trace
from services.engine.compilation.trace.transformed_code import dumping_transformed_code
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS, CompilationConfig
from services.engine.config.compilation_level import CompilationLevel

log = structlog.get_logger()

_CHECK = torch.ops.aten._assert_scalar.default
_OF_SIZES = frozenset({
    operator.eq, operator.ge, operator.le, operator.gt, operator.lt, torch.sym_not,
    torch.ops.aten.sym_size.int,
})  # fmt: skip


def trace_programs(
    model: nn.Module,
    config: CompilationConfig,
    *,
    example_inputs: Sequence[Tensor],
    max_num_tokens: int,
    dump: DebugDump | None = None,
) -> TracedModel:
    """Traces a model, runs the passes, and splits it at operators if the level says so.

    Args:
        model: loaded; it is unchanged and may run meanwhile.
        config: level and options.
        example_inputs: arguments of forward with the kinds of a step's, any content.
        max_num_tokens: most tokens in one step.
        dump: receives the traced graph, and the graph after each pass.

    Raises:
        ValueError: the model declares nothing, does not return one tensor, lacks a splitting
            operator, or promises a match to a pass that has none.
        ImpureForwardError: its forward changes buffers, attributes or globals.
    """
    ranges = compile_ranges(config.compile_ranges, max_num_tokens)
    is_piecewise = config.level == CompilationLevel.PIECEWISE
    splitting_ops = config.splitting_ops if is_piecewise else ()
    rewriting = _Rewriting(config, expected_passes_of(model), dump)
    if _may_repeat(model) and set(splitting_ops) == set(DEFAULT_SPLITTING_OPS):
        layers = model.decoder_layers
        kinds = [kind_of(layer) for layer in layers]
        indices = layers_to_trace(kinds)
        if indices is not None:
            trace = _trace(model.with_layers(indices), example_inputs, dump)
            few = _FewLayers(layers, kinds, indices)
            programs = _repeated(rewriting, trace, ranges, few)
            if programs is not None:
                plain = without_adapters(trace)
                free = None if plain is None else _repeated(rewriting, plain, ranges, few)
                return TracedModel(
                    trace=trace,
                    programs=programs,
                    layers=layers,
                    pass_matches=rewriting.matches,
                    adapter_free=free or (),
                )
    trace = _trace(model, example_inputs, dump)
    _require_splits(trace, splitting_ops)

    def programs_of(trace: Trace) -> Programs:
        return tuple(
            (each, read_program(rewriting.run(trace, each), splitting_ops)) for each in ranges
        )

    plain = without_adapters(trace)
    return TracedModel(
        trace=trace,
        programs=programs_of(trace),
        layers=(),
        pass_matches=rewriting.matches,
        adapter_free=() if plain is None else programs_of(plain),
    )


def _may_repeat(model: nn.Module) -> TypeGuard[CausalLM]:
    """Whether a few layers can stand for all; outputs of aux layers reach over many others."""
    return isinstance(model, CausalLM) and model.output_size == model.config.hidden_size


def _trace(model: nn.Module, inputs: Sequence[Tensor], dump: DebugDump | None) -> Trace:
    with dumping_transformed_code(dump):
        trace = trace_model(model, inputs)
    if dump is not None:
        dump.graph("traced_graph", trace.graph)
    return trace


class _Rewriting:
    """Runs the passes of a configuration on copies of a trace."""

    def __init__(
        self, config: CompilationConfig, expected: Collection[str], dump: DebugDump | None
    ) -> None:
        self._config = config
        self._expected = expected
        self._dump = dump
        self.matches: dict[str, int] = {}

    def run(self, trace: Trace, compile_range: CompileRange) -> Trace:
        """Returns the trace as the passes of a range leave it."""
        graph = copy.deepcopy(trace.graph)
        drop_size_checks(graph.graph)
        manager = PostGradPassManager(
            selected_passes(self._config),
            compile_range=compile_range,
            expected=self._expected,
            allows_unmatched=self._config.allow_unmatched_passes,
        )
        dump = None if self._dump is None else self._dump.of_range(compile_range)
        for name, count in manager.run(graph, dump).items():
            self.matches[name] = max(count, self.matches.get(name, 0))
        return replace(trace, graph=graph)


@dataclass(frozen=True, slots=True)
class _FewLayers:
    """Layers that were traced for all, by their indices."""

    layers: Sequence[nn.Module]
    kinds: Sequence[Hashable]
    indices: Sequence[int]


def _repeated(
    rewriting: _Rewriting, trace: Trace, ranges: Sequence[CompileRange], few: _FewLayers
) -> Programs | None:
    """Returns the programs of all layers from the trace of a few; None if they have no pattern."""
    chosen = [few.layers[index] for index in few.indices]
    traced_kinds = [few.kinds[index] for index in few.indices]
    try:
        return tuple(
            (
                each,
                repeat_layers(
                    read_program(rewriting.run(trace, each), DEFAULT_SPLITTING_OPS, chosen),
                    traced_kinds,
                    few.kinds,
                ),
            )
            for each in ranges
        )
    except CannotRepeatError as error:
        log.warning("all_layers_traced", reason=str(error))
        return None


def _require_splits(trace: Trace, splitting_ops: Sequence[str]) -> None:
    """Raises ValueError unless every splitting operator occurs; a model has one attention."""
    for name in splitting_ops:
        if name not in DEFAULT_SPLITTING_OPS and not num_calls(trace.graph, (name,)):
            raise ValueError(f"splitting operator {name} does not occur in the model")


def drop_size_checks(graph: Graph) -> None:
    """Removes the checks that inputs are as long as each other, and what only they use.

    The runner makes all inputs of a step of one length. One of the checks imports sympy when it
    runs, which takes a second of a start.
    """
    for node in graph.find_nodes(op="call_function", target=_CHECK):
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _OF_SIZES and not node.users:
            graph.erase_node(node)
