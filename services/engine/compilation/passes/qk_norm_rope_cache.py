"""Folds rotations of queries and keys, and norms of what is cached, into attention's arguments."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from services.engine.compilation.passes.aliasing import is_written_between
from services.engine.compilation.passes.graph_pass import NodePass
from services.engine.compilation.passes.operations import calls, operation_of, tensor_of
from services.engine.compilation.passes.rewriting import replace, same_shape

_ATTENTION = "octavo::unified_attention_with_output"
_LATENT_ATTENTION = "octavo::latent_attention_with_output"
_SHAPE_READERS = ("new_empty", "size", torch.empty_like)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Queries or keys before their norm and rotation, and the arguments of both."""

    source: Node
    cos: Node
    signed_sin: Node
    weight: Node | None
    eps: float


class QkNormRopeCachePass(NodePass):
    """Attention of rotated and perhaps normalised heads rotates and normalises them itself.

    A kernel that writes keys to the cache anyway does this with them. Latent attention rotates
    parts of queries and keys and normalises latent vectors.
    """

    name = "qk_norm_rope_cache"

    def _fuse(self, node: Node) -> bool:
        if calls(node, _ATTENTION):
            return _fold(node)
        return calls(node, _LATENT_ATTENTION) and _fold_latent(node)


def _fold(node: Node) -> bool:
    operation = operation_of(node)
    assert operation is not None, "the caller checked it"
    q, k, v, output, layer_index, cos, *others = operation.args
    if k is None:
        return False
    queries, keys = _heads(q, node), _heads(k, node)
    if cos is not None or queries is None or keys is None:
        return False
    if not _is_dense(queries.source, 2) or not _is_dense(keys.source, 2):
        return False
    if not all(_has_whole_rows(each) for each in (queries.source, keys.source, v, queries.cos)):
        return False
    if not _has_equal_strides(queries.cos, queries.signed_sin):
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


def _fold_latent(node: Node) -> bool:
    operation = operation_of(node)
    assert operation is not None, "the caller checked it"
    q, latent, k, cos = (operation.args[number] for number in (1, 2, 3, 13))
    queries, keys, norm = _heads(q, node), _heads(k, node), operation_of(latent)
    if cos is not None or queries is None or keys is None or norm is None:
        return False
    if (queries.cos, queries.signed_sin) != (keys.cos, keys.signed_sin):
        return False
    # The operator normalises no heads.
    if queries.weight is not None or keys.weight is not None or norm.name != "octavo::rms_norm":
        return False
    source, weight, eps = norm.args
    if not all(_is_dense(each, 1) for each in (queries.source, source, keys.source)):
        return False
    if not _is_only_for(latent, node) or is_written_between([source, weight], latent, node):
        return False
    transform = (queries.cos, queries.signed_sin, weight, eps)
    plain, others = operation.args[0], operation.args[4:13]
    node.args = (plain, queries.source, source, keys.source, *others, *transform)
    node.kwargs = {}
    for made, given in ((q, queries.source), (latent, source), (k, keys.source)):
        replace(made, given)
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
    read = [each for each in (source, cos, signed_sin, weight) if each is not None]
    if is_written_between(read, first, attention):
        return None
    return _Heads(source=source, cos=cos, signed_sin=signed_sin, weight=weight, eps=eps)


def _is_dense(node: Node, num_dims: int) -> bool:
    """Whether the last dimensions of a tensor are contiguous, for any number of tokens."""
    tensor = tensor_of(node)
    if tensor is None or tensor.dim() < num_dims:
        return False
    strides = (tensor.shape[-1], 1) if num_dims == 2 else (1,)
    return same_shape(tensor.stride()[-num_dims:], strides)


def _has_whole_rows(node: Node) -> bool:
    """Whether tokens are a multiple of the last dimension apart, as kernels count them."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.stride(0) % tensor.shape[-1] == 0


def _has_equal_strides(first: Node, second: Node) -> bool:
    """Whether two tensors have the same strides: kernels get those of one."""
    one, other = tensor_of(first), tensor_of(second)
    return one is not None and other is not None and same_shape(one.stride(), other.stride())


def _is_only_for(value: Node, attention: Node) -> bool:
    """Whether other users than attention only ask for the tensor's shape."""
    return all(user is attention or user.target in _SHAPE_READERS for user in value.users)
