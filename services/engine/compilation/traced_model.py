"""A traced model: its programs before any piece is compiled."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from torch import Tensor, nn

from models.layers.decoder import CausalLM
from services.engine.compilation.backend import Trace, trace_model
from services.engine.compilation.compile_range import CompileRange, compile_ranges
from services.engine.compilation.layer_kinds import kind_of, layers_to_trace
from services.engine.compilation.program import (
    CannotRepeatError,
    Program,
    read_program,
    repeat_layers,
)
from services.engine.compilation.split_graph import num_calls
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS, CompilationConfig
from services.engine.config.compilation_level import CompilationLevel

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model's trace, and its program for each range of numbers of tokens, ascending.

    trace: of all layers, or of a few that stand for all.
    layers: the model's, whose weights the programs name.
    """

    trace: Trace
    programs: tuple[tuple[CompileRange, Program], ...]
    layers: Sequence[nn.Module]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: CompilationConfig,
        *,
        example_inputs: Sequence[Tensor],
        max_num_tokens: int,
    ) -> "TracedModel":
        """Traces a model and splits it at the splitting operators if the level says so.

        Args:
            model: loaded; it is unchanged and may run meanwhile.
            config: level and options.
            example_inputs: arguments of forward with the kinds of a step's, any content.
            max_num_tokens: most tokens in one step.

        Raises:
            ValueError: the model declares nothing, does not return one tensor, or lacks a splitting
                operator.
            ImpureForwardError: its forward changes buffers, attributes or globals.
        """
        is_piecewise = config.level == CompilationLevel.PIECEWISE
        splitting_ops = config.splitting_ops if is_piecewise else ()
        ranges = compile_ranges(config.compile_ranges, max_num_tokens)
        if isinstance(model, CausalLM) and set(splitting_ops) == set(DEFAULT_SPLITTING_OPS):
            try:
                traced = cls._of_few_layers(model, example_inputs, splitting_ops, ranges)
            except CannotRepeatError as error:
                log.warning("all_layers_traced", reason=str(error))
                traced = None
            if traced is not None:
                return traced
        trace = trace_model(model, example_inputs)
        _require_splits(trace, splitting_ops)
        programs = ((each, _program(trace, each, splitting_ops)) for each in ranges)
        return cls(trace=trace, programs=tuple(programs), layers=())

    @classmethod
    def _of_few_layers(
        cls,
        model: CausalLM,
        inputs: Sequence[Tensor],
        splitting_ops: Sequence[str],
        ranges: Sequence[CompileRange],
    ) -> "TracedModel | None":
        """Traces a few layers for all; returns None if that is not fewer."""
        layers = model.decoder_layers
        kinds = [kind_of(layer) for layer in layers]
        indices = layers_to_trace(kinds)
        if indices is None:
            return None
        chosen = [layers[index] for index in indices]
        trace = trace_model(model.with_layers(indices), inputs)
        few = [kinds[index] for index in indices]
        programs = (
            (each, repeat_layers(_program(trace, each, splitting_ops, chosen), few, kinds))
            for each in ranges
        )
        return cls(trace=trace, programs=tuple(programs), layers=layers)


def _program(
    trace: Trace,
    compile_range: CompileRange,
    splitting_ops: Sequence[str],
    layers: Sequence[nn.Module] = (),
) -> Program:
    """Returns the program of a range of numbers of tokens."""
    graph = copy.deepcopy(trace.graph)
    return read_program(replace(trace, graph=graph), splitting_ops, layers)


def _require_splits(trace: Trace, splitting_ops: Sequence[str]) -> None:
    """Raises ValueError unless every splitting operator occurs; a model has one attention."""
    for name in splitting_ops:
        if name not in DEFAULT_SPLITTING_OPS and not num_calls(trace.graph, (name,)):
            raise ValueError(f"splitting operator {name} does not occur in the model")
