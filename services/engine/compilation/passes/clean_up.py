"""Removes what the other passes leave unused, and views that change nothing."""

from typing import Any

from torch import SymInt, Tensor
from torch.fx import Graph, Node

from services.engine.compilation.passes.aliasing import written
from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.views import remove_views


class CleanUpPass(GraphPass):
    """Removes reshapes without effect, repeated splits, and unused values.

    Operators that write to their arguments stay, as do checks.
    """

    name = "clean_up"

    def run(self, graph: Graph) -> int:
        """Removes them; returns how many nodes."""
        num_removed = remove_views(graph)
        for node in reversed(graph.nodes):
            if _is_unused(node):
                graph.erase_node(node)
                num_removed += 1
        return num_removed


def _is_unused(node: Node) -> bool:
    """Whether a node only computes a value, which nothing uses."""
    if node.op not in ("call_function", "call_method", "get_attr") or node.users:
        return False
    return _is_value(node.meta.get("example_value")) and not written(node) and not node.is_impure()


def _is_value(result: Any) -> bool:
    """Whether a result is a tensor, a size, or several; checks and logs return None."""
    if isinstance(result, (tuple, list)):
        return bool(result) and all(_is_value(each) for each in result)
    return isinstance(result, (Tensor, SymInt, int))
