"""Folds the rotation of queries and keys, and the norms before it, into attention's arguments."""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from services.engine.compilation.passes.aliasing import is_written_between
from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.operations import calls, operation_of, tensor_of
from services.engine.compilation.passes.rewriting import replace, same_shape

_ATTENTION = "octavo::unified_attention_with_output"
_SHAPE_READERS = ("new_empty", "size", torch.empty_like)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Queries or keys before their norm and rotation, and the arguments of both."""

    source: Node
    cos: Node
    signed_sin: Node
    weight: Node | None
    eps: float


class QkNormRopeCachePass(GraphPass):
    """Attention of rotated and perhaps normalised heads rotates and normalises them itself.

    A kernel that writes keys to the cache anyway does this with them.
    """

    name = "qk_norm_rope_cache"

    def run(self, graph: Graph) -> int:
        """Rewrites every match; returns how many there were."""
        return sum(_fold(node) for node in graph.nodes if calls(node, _ATTENTION))


def _fold(node: Node) -> bool:
    operation = operation_of(node)
    assert operation is not None, "the caller checked it"
    q, k, v, output, layer_index, cos, *others = operation.args
    queries, keys = _heads(q, node), _heads(k, node)
    if cos is not None or queries is None or keys is None:
        return False
    if (queries.cos, queries.signed_sin) != (keys.cos, keys.signed_sin):
        return False
    if (queries.weight is None) != (keys.weight is None) or queries.eps != keys.eps:
        return False
    folded = (queries.cos, queries.signed_sin, queries.weight, keys.weight, queries.eps)
    node.args = (queries.source, keys.source, v, output, layer_index, *folded, *others[4:])
    node.kwargs = {}
    for rotated, heads in ((q, queries), (k, keys)):
        replace(rotated, heads.source)
    return True


def _heads(rotated: Node, attention: Node) -> _Heads | None:
    """Returns how rotated heads are computed; None if attention cannot compute them."""
    rotary = operation_of(rotated)
    if rotary is None or rotary.name != "octavo::rotary" or not _is_only_for(rotated, attention):
        return None
    source, cos, signed_sin = rotary.args
    first, weight, eps = rotated, None, 0.0
    norm = operation_of(source)
    if norm is not None and norm.name == "octavo::rms_norm" and len(source.users) == 1:
        first = source
        source, weight, eps = norm.args
    tensor = tensor_of(source)
    if tensor is None or tensor.dim() != 3:
        return None
    read = [each for each in (source, cos, signed_sin, weight) if each is not None]
    has_rows = same_shape(tensor.stride()[1:], (tensor.shape[2], 1))
    if not has_rows or is_written_between(read, first, attention):
        return None
    return _Heads(source=source, cos=cos, signed_sin=signed_sin, weight=weight, eps=eps)


def _is_only_for(value: Node, attention: Node) -> bool:
    """Whether other users than attention only ask for the tensor's shape."""
    return all(user is attention or user.target in _SHAPE_READERS for user in value.users)
