"""Root-mean-square norms: functional.rms_norm, and spelled out."""

from typing import Any

import torch
from torch.fx import Node

from services.engine.compilation.passes.operations import operation_of, tensor_of, without_casts
from services.engine.compilation.passes.pattern import Call, Cast, Operand, find
from services.engine.compilation.passes.rewriting import insert_operator, replace, same_shape

_X = Cast(Operand("x"))
_SHIFTED = [
    Call("add", (Call("mean", (square, Operand("dims"), True)), Operand("eps"), 1))
    for square in (Call("pow", (_X, 2)), Call("square", (_X,)), Call("mul", (_X, _X)))
]
_NORMALIZED = [
    normalized
    for shifted in _SHIFTED
    for normalized in (
        Call("mul", (_X, Call("rsqrt", (shifted,)))),
        Call("mul", (_X, Call("pow", (shifted, -0.5)))),
        Call("div", (_X, Call("sqrt", (shifted,)))),
    )
]
_NORMS = [Call("mul", (Cast(each), Cast(Operand("weight")))) for each in _NORMALIZED]


def use_rms_norm(node: Node) -> bool:
    """Rewrites a norm over the last dimension with a weight.

    Spelled out, transformers rounds to the input's dtype before it applies the weight, other code
    after it; the operator rounds once, at the end.
    """
    operation = operation_of(node)
    if operation is not None and operation.name == "rms_norm":
        x, shape, weight, eps = operation.args
        return len(shape) == 1 and _rewrite(node, x, weight, eps)
    match = find(*_NORMS, at=node)
    if match is None or not isinstance(match["eps"], float):
        return False
    x, dims = tensor_of(match["x"]), match["dims"]
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    if x is None or dims not in ((-1,), (x.dim() - 1,)):
        return False
    return _rewrite(_last(node, x.dtype), match["x"], match["weight"], match["eps"])


def _last(node: Node, dtype: torch.dtype) -> Node:
    """Returns the cast to a dtype that ends a norm, or the node itself."""
    users = list(node.users)
    result = tensor_of(users[0]) if len(users) == 1 else None
    is_cast = (
        result is not None and result.dtype == dtype and without_casts(users[0]) is not users[0]
    )
    return users[0] if is_cast else node


def _rewrite(node: Node, x: Any, weight: Any, eps: float | None) -> bool:
    """Replaces a norm if the operator computes the same shape and dtype."""
    source, scales, result = tensor_of(x), tensor_of(weight), tensor_of(node)
    if source is None or scales is None or result is None:
        return False
    if not source.dtype == scales.dtype == result.dtype:
        return False
    if not same_shape(scales.shape, source.shape[-1:]):
        return False
    if eps is None:
        eps = torch.finfo(source.dtype).eps
    replace(node, insert_operator(node, "rms_norm", x, weight, eps, like=node))
    return True
