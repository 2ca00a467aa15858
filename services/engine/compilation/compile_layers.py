"""Compiles layers that run one by one: those of an encoder of images."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from models.layers.vision_tower import TowerLayers
from services.engine.compilation.cache.program_store import load_program, store_program
from services.engine.compilation.pieces.linking import Forward, link
from services.engine.compilation.pieces.piece_compiler import MissingPieceError, PieceCompiler
from services.engine.compilation.program.compile_range import ANY_TOKENS
from services.engine.compilation.program.program import read_program
from services.engine.compilation.program.traced_model import TracedModel
from services.engine.compilation.trace.layer_kinds import kind_of

if TYPE_CHECKING:
    from services.engine.compilation.cache.artifact_cache import ArtifactCache

EXAMPLE_NUM_ROWS = 8
"""Rows of the traced inputs; compiled code takes any number."""


def compile_layers(
    layers: TowerLayers,
    compiler: PieceCompiler,
    *,
    name: str,
    cache: "ArtifactCache | None" = None,
) -> list[Forward]:
    """Returns compiled code of each layer; layers that are alike share one trace and one piece.

    No pass runs, so what is compiled is each operation as the layer calls it.

    Args:
        layers: on their device, with any weights.
        compiler: of any number of tokens.
        name: of these layers among the programs in the cache.
        cache: keeps the traces; without one, all are made.

    Raises:
        ImpureForwardError: a layer changes buffers, attributes or globals.
    """
    kinds: dict[Hashable, TracedModel] = {}
    forwards: list[Forward] = []
    for layer in layers:
        kind = kind_of(layer)
        if kind in kinds:
            forwards.append(link(replace(kinds[kind], layers=[layer]), compiler))
            continue
        number = len(kinds)

        def trace(layer: nn.Module = layer) -> TracedModel:
            return _traced(layers, layer)

        kinds[kind], forward = _compiled(layer, compiler, f"{name}_{number}", cache, trace)
        forwards.append(forward)
    return forwards


def _compiled(
    layer: nn.Module,
    compiler: PieceCompiler,
    name: str,
    cache: "ArtifactCache | None",
    trace: Callable[[], TracedModel],
) -> tuple[TracedModel, Forward]:
    """Returns a layer's trace, the kept one if there is one, and its compiled code."""
    kept = None
    if cache is not None:
        kept = load_program(cache, name, model=layer, layers=[layer], ranges=[ANY_TOKENS])
    if kept is not None:
        try:
            return kept, link(kept, compiler)
        except MissingPieceError:
            pass  # a trace was kept and its code was not
    traced = trace()
    forward = link(traced, compiler)
    if cache is not None:
        store_program(cache, name, traced, layer)
    return traced, forward


def _traced(layers: TowerLayers, layer: nn.Module) -> TracedModel:
    """Traces one layer, for any number of rows."""
    # The compiler takes 2 s to import, and kept programs need none.
    from services.engine.compilation.trace.backend import trace_model
    from services.engine.compilation.trace.tracing import drop_size_checks

    trace = trace_model(layer, layers.example_inputs(EXAMPLE_NUM_ROWS))
    drop_size_checks(trace.graph.graph)
    program = read_program(trace, (), [layer])
    return TracedModel(
        trace=trace, programs=((ANY_TOKENS, program),), layers=[layer], pass_matches={}
    )
