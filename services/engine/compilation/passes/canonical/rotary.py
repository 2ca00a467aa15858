"""Rotary positions, in the spelling of transformers."""

import operator

import torch
from torch.fx import Node

from services.engine.compilation.passes.canonical.halves import whole_of
from services.engine.compilation.passes.operations import tensor_of
from services.engine.compilation.passes.pattern import Call, Operand, find_all
from services.engine.compilation.passes.rewriting import (
    insert,
    insert_operator,
    replace,
    same_shape,
)

_COS, _SIN, _FIRST, _SECOND = map(Operand, ("cos", "sin", "first", "second"))
_SWAPPED = Call("cat", ((Call("neg", (_SECOND,)), _FIRST), Operand("dim")))
_ROTATION = Call("add", (Call("mul", (Operand("x"), _COS)), Call("mul", (_SWAPPED, _SIN)), 1))
_SIGNED = "octavo_signed"


def use_rotary(node: Node) -> bool:
    """Rewrites x * cos + cat((-x2, x1)) * sin for x [T, H, D], cos and sin [T, 1, D].

    x1 and x2 are the halves of the last dimension. The halves of cos must be equal, and those of
    sin, as in every table for this rotation.
    """
    for match in find_all(_ROTATION, at=node):
        x, cos, sin = (match[name] for name in ("x", "cos", "sin"))
        is_rotated = whole_of(match["first"], match["second"]) is x and match["dim"] in (-1, 2)
        if is_rotated and _fit(x, cos) and _fit(x, sin):
            arguments = (x, cos, _with_signs(sin))
            replace(node, insert_operator(node, "rotary", *arguments, like=node))
            return True
    return False


def _fit(x: object, table: object) -> bool:
    heads, angles = tensor_of(x), tensor_of(table)
    if heads is None or angles is None or heads.dim() != 3 or heads.dtype != angles.dtype:
        return False
    return same_shape(angles.shape, (heads.shape[0], 1, heads.shape[2]))


def _with_signs(sin: Node) -> Node:
    """Returns a sine whose first half is negated; one node for all uses."""
    if _SIGNED not in sin.meta:
        place = sin.next
        while place.op == "placeholder":
            place = place.next
        halves = insert(place, torch.chunk, sin, 2, -1)
        first, second = (insert(place, operator.getitem, halves, index) for index in (0, 1))
        sin.meta[_SIGNED] = insert(place, torch.cat, (insert(place, torch.neg, first), second), -1)
    signed: Node = sin.meta[_SIGNED]
    return signed
