"""Finds layers that are alike, so that a few of them are traced for all.

A piece between two attention operators belongs to two layers, so what must be traced is every pair
of kinds of neighbouring layers.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_OF_ONE_LAYER = frozenset({"layer_index", "_layer_index"})
"""Attributes in which layers of one kind differ."""
_OF_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that every module has; parameters, buffers and submodules are compared by content."""


def kind_of(layer: nn.Module) -> Hashable:
    """Returns a value that is equal for layers that compute the same with other weights."""
    return tuple(
        (name, type(module), _attributes(module), _tensors(module))
        for name, module in layer.named_modules()
    )


def layers_to_trace(kinds: Sequence[Hashable]) -> list[int] | None:
    """Chooses the fewest layers whose neighbours show all pairs of kinds.

    The first two layers stay first: the piece between them may take values of the model's beginning
    that later pieces take from the piece before them.

    Args:
        kinds: of the model's layers, in order.

    Returns:
        Indices of the layers to trace in this order, each once; None if all must be traced.
    """
    if len(kinds) < 4:
        return None
    wanted = frozenset(pairwise(kinds[1:]))
    walk = _shortest_walk(list(kinds[:2]), wanted, kinds[-1])
    indices: list[int] = [0, 1]
    free = {kind: [i for i in range(2, len(kinds)) if kinds[i] == kind] for kind in set(kinds)}
    for kind in walk[2:]:
        if not free[kind]:
            return None
        indices.append(free[kind].pop(0))
    return indices if len(indices) < len(kinds) else None


def _shortest_walk(
    start: list[Hashable], wanted: frozenset[tuple[Hashable, Hashable]], last: Hashable
) -> list[Hashable]:
    """Returns the shortest sequence from `start` to `last` with all wanted pairs and no others."""
    waiting = deque([(start, frozenset[tuple[Hashable, Hashable]]())])
    seen = set()
    while waiting:
        walk, covered = waiting.popleft()
        if covered == wanted and walk[-1] == last:
            return walk
        for pair in sorted(wanted, key=repr):
            state = (pair[1], covered | {pair})
            if pair[0] == walk[-1] and state not in seen:
                seen.add(state)
                waiting.append(([*walk, pair[1]], state[1]))
    raise AssertionError("the layers themselves are such a sequence")


def _attributes(module: nn.Module) -> Hashable:
    """Returns a module's own attributes, those of one layer left out."""
    return tuple(
        (name, _comparable(value))
        for name, value in sorted(vars(module).items())
        if name not in _OF_MODULES and name not in _OF_ONE_LAYER
    )


def _comparable(value: Any) -> Hashable:
    """Returns a value to compare: plain data by content, anything else by identity."""
    if is_dataclass(value) and not isinstance(value, type):
        contents = [getattr(value, field.name) for field in fields(value)]
        return (type(value), _comparable(contents))
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(each) for each in value)
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype)):
        return (type(value), value)
    return id(value)


def _tensors(module: nn.Module) -> Hashable:
    """Returns the form of a module's own parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    return tuple((name, _form(tensor)) for name, tensor in own.items())


def _form(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
