"""The residual stream in a graph: who may overwrite it, and the norm that reads it next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from services.engine.compilation.passes.aliasing import (
    is_last_reader,
    is_written_between,
    share_memory,
)
from services.engine.compilation.passes.operations import calls, operation_of
from services.engine.compilation.passes.rewriting import (
    are_before,
    has_same_kind,
    insert,
    is_contiguous,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A call of octavo::rms_norm, its weight and eps."""

    node: Node
    weight: Node
    eps: float


def own_residual(total: Node, residual: Node, read: Sequence[Any]) -> Node | None:
    """Returns a tensor with the residual's value that an operator at the sum may overwrite.

    That is the residual itself, or a copy if its old value is needed elsewhere.

    Args:
        total: the sum of the residual and something else.
        residual: one of its terms.
        read: what the operator reads besides.

    Returns:
        None if the graph itself overwrites the residual and no operator can do so at once.
    """
    if not has_same_kind(residual, total):
        return None
    is_apart = not any(share_memory(residual, each) for each in read) and is_contiguous(residual)
    if calls(total, "iadd"):
        return residual if is_apart else None
    if is_apart and is_last_reader(total, residual):
        return residual
    return insert(total, torch.clone, residual, memory_format=torch.contiguous_format)


def next_norm(total: Node) -> Norm | None:
    """Returns the first norm of a sum, if an operator can compute it together with the sum."""
    for user in sorted(total.users):
        operation = operation_of(user)
        if operation is not None and operation.name == "octavo::rms_norm":
            value, weight, eps = operation.args
            is_ready = are_before(total, [weight]) and not is_written_between([total], total, user)
            if value is total and is_ready:
                return Norm(node=user, weight=weight, eps=eps)
    return None
