"""Recognises two halves of a tensor, however they were cut."""

from collections.abc import Iterator

from torch.fx import Node

from services.engine.compilation.passes.aliasing import share_memory
from services.engine.compilation.passes.operations import tensor_of
from services.engine.compilation.passes.rewriting import same_shape


def whole_of(first: object, second: object) -> Node | None:
    """Returns the nearest node whose last dimension is cut into two halves, in this order.

    They may be chunks, parts of a split, or slices.
    """
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    others = set(_sources(second))
    for source in _sources(first):
        if source in others and _are_halves(source, first, second):
            return source
    return None


def _sources(view: Node) -> Iterator[Node]:
    """Yields the nodes that a node is a view of, itself first."""
    node = view
    while True:
        yield node
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not share_memory(source, view):
            return
        node = source


def _are_halves(source: Node, first: Node, second: Node) -> bool:
    whole, left, right = tensor_of(source), tensor_of(first), tensor_of(second)
    if whole is None or left is None or right is None:
        return False
    size, offset = left.shape[-1], whole.storage_offset()
    return (
        same_shape((*left.shape[:-1], 2 * size), whole.shape)
        and same_shape(right.shape, left.shape)
        and same_shape(left.stride(), whole.stride())
        and same_shape(right.stride(), whole.stride())
        and whole.stride(-1) == 1
        and (left.storage_offset(), right.storage_offset()) == (offset, offset + size)
    )
