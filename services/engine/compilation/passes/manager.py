"""Runs the compiler passes over a traced graph, in order."""

from collections.abc import Collection, Mapping, Sequence

import structlog
from torch.fx import GraphModule

from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.unmatched import UnmatchedPassError
from services.engine.compilation.program.compile_range import ANY_TOKENS, CompileRange
from services.engine.compilation.program.debug_dump import DebugDump

log = structlog.get_logger()


class PostGradPassManager:
    """The passes that a configuration selects.

    The name is that of other engines, whose passes run after autograd's; these run before it, on
    the graph that Dynamo traced, which has no gradients either.
    """

    def __init__(
        self,
        passes: Sequence[GraphPass],
        *,
        compile_range: CompileRange = ANY_TOKENS,
        expected: Collection[str] = (),
        allows_unmatched: bool = False,
    ) -> None:
        """Keeps the passes in order.

        Args:
            passes: each at most once; those not applicable for the range are left out.
            compile_range: the numbers of tokens that graphs will be run with.
            expected: names of passes that must match something, if they are among the passes.
            allows_unmatched: log a warning when they do not, instead of raising.
        """
        self._passes = [each for each in passes if each.is_applicable_for_range(compile_range)]
        self._expected = expected
        self._allows_unmatched = allows_unmatched

    def run(self, graph: GraphModule, dump: DebugDump | None = None) -> Mapping[str, int]:
        """Rewrites a graph in place.

        Args:
            graph: traced by Dynamo; its nodes have fake tensors.
            dump: gets the graph after each pass.

        Returns:
            The matches of each pass, by name.

        Raises:
            UnmatchedPassError: an expected pass matched nothing.
        """
        matches: dict[str, int] = {}
        for number, each in enumerate(self._passes, start=1):
            matches[each.name] = each.run(graph.graph)
            if dump is not None:
                graph.recompile()
                dump.graph(f"pass_{number}_{each.name}", graph)
        graph.graph.lint()
        graph.recompile()
        self._check(matches)
        return matches

    def _check(self, matches: Mapping[str, int]) -> None:
        unmatched = [
            name for name, count in matches.items() if not count and name in self._expected
        ]
        if not unmatched:
            return
        if self._allows_unmatched:
            log.warning("passes_without_match", passes=unmatched)
            return
        raise UnmatchedPassError(
            f"passes {', '.join(unmatched)} match nothing, and the model promises that they do. "
            "Start with --allow-unmatched-passes to run it anyway, or with --debug-dump-path to "
            "see the graph after each pass."
        )
