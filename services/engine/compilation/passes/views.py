"""Removes views of a graph that change nothing, and views that exist already."""

from torch.fx import Graph, Node

from services.engine.compilation.passes.aliasing import share_memory, written
from services.engine.compilation.passes.operations import tensor_of
from services.engine.compilation.passes.rewriting import has_same_kind, replace, same_shape


def remove_views(graph: Graph) -> int:
    """Removes them; returns how many.

    A reshape, cast or copy to what a tensor already is returns the tensor itself. Equal splits of
    one tensor are one, and so are equal parts of it.
    """
    num_removed = 0
    known: dict[str, Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not share_memory(node, source) or written(node):
            continue
        earlier = source
        if not _is_same_view(node, source):
            key = repr((node.op, node.target, node.args, sorted(node.kwargs.items())))
            earlier = known.setdefault(key, node)
        if earlier is not node:
            replace(node, earlier)
            num_removed += 1
    return num_removed


def _is_same_view(node: Node, source: Node) -> bool:
    """Whether a node is the whole of its source, in the same shape."""
    view, whole = tensor_of(node), tensor_of(source)
    if view is None or whole is None or not has_same_kind(node, source):
        return False
    has_same_offset = same_shape([view.storage_offset()], [whole.storage_offset()])
    return has_same_offset and same_shape(view.stride(), whole.stride())
