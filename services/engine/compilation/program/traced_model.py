"""A traced model, before or after a start has kept it on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from services.engine.compilation.program.compile_range import CompileRange
from services.engine.compilation.program.own_kernels import only_calls_own_kernels
from services.engine.compilation.program.piece_code import PieceCode
from services.engine.compilation.program.program import Program, Trace

Programs = tuple[tuple[CompileRange, Program], ...]
"""The program of each range of numbers of tokens, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model's trace and its programs.

    trace: of all layers, or of a few that stand for all; None if it was made by an earlier start.
    adapter_free: the programs of steps without adapters; empty of a model without room for some.
    layers: the model's, whose weights the programs name.
    pass_matches: matches of each pass in the trace, the most of any range.
    """

    trace: Trace | None
    programs: Programs
    layers: Sequence[nn.Module]
    pass_matches: Mapping[str, int]
    adapter_free: Programs = ()

    @property
    def has_own_kernels_only(self) -> bool:
        """Whether a compiler has nothing to generate for any piece."""
        pieces = [
            part.item.graph
            for _, program in (*self.programs, *self.adapter_free)
            for part in program.parts
            if not part.item.is_splitting_graph
        ]
        return all(
            each.signature is None if isinstance(each, PieceCode) else only_calls_own_kernels(each)
            for each in pieces
        )
