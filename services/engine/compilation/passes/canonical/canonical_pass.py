"""Turns other spellings of products, norms, gates and rotations into Octavo's operators."""

from collections.abc import Sequence
from pathlib import Path

from torch.fx import Graph

from services.engine.compilation.passes.canonical.gate import use_silu_and_mul
from services.engine.compilation.passes.canonical.linear import use_linear
from services.engine.compilation.passes.canonical.norm import use_rms_norm
from services.engine.compilation.passes.canonical.rotary import use_rotary
from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.views import remove_views

_REWRITES = (use_linear, use_rms_norm, use_silu_and_mul, use_rotary)


class CanonicalPass(GraphPass):
    """Models written by other conventions get the operators that the later passes look for."""

    name = "canonical"

    @property
    def sources(self) -> Sequence[Path]:
        """All files of this folder."""
        return sorted(Path(__file__).parent.glob("*.py"))

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        remove_views(graph)
        return sum(any(rewrite(node) for rewrite in _REWRITES) for node in graph.nodes)
