"""Reads the nodes of a Dynamo graph: one name for each spelling of an operation."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional

from services.engine.compilation.program.split_graph import operator_name

CASTS = frozenset({"to", "float", "type_as", "bfloat16", "half", "double"})
"""Methods that change a tensor's dtype."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_FUNCTIONS: Mapping[Any, str] = {
    operator.add: "add",
    operator.iadd: "iadd",
    operator.mul: "mul",
    operator.neg: "neg",
    operator.pow: "pow",
    operator.sub: "sub",
    operator.truediv: "div",
    torch.add: "add",
    torch.cat: "cat",
    torch.concat: "cat",
    torch.div: "div",
    torch.mean: "mean",
    torch.mul: "mul",
    torch.neg: "neg",
    torch.pow: "pow",
    torch.rms_norm: "rms_norm",
    torch.rsqrt: "rsqrt",
    torch.sigmoid: "sigmoid",
    torch.sqrt: "sqrt",
    torch.square: "square",
    torch.sub: "sub",
    functional.linear: "linear",
    functional.rms_norm: "rms_norm",
    functional.sigmoid: "sigmoid",
    functional.silu: "silu",
}
_METHODS = {
    **{name: name for name in ("add", "div", "mean", "mul", "neg", "pow", "rsqrt", "sigmoid")},
    **{name: name for name in ("sqrt", "square", "sub")},
    "add_": "iadd",
}
_REQUIRED = object()
_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "cat": {"tensors": _REQUIRED, "dim": 0},
    "linear": {"input": _REQUIRED, "weight": _REQUIRED, "bias": None},
    "mean": {"input": _REQUIRED, "dim": None, "keepdim": False},
    "pow": {"input": _REQUIRED, "exponent": _REQUIRED},
    "rms_norm": {
        "input": _REQUIRED,
        "normalized_shape": _REQUIRED,
        "weight": None,
        "eps": None,
    },
    "silu": {"input": _REQUIRED, "inplace": False},
    **{
        name: {"input": _REQUIRED, "other": _REQUIRED, "alpha": 1}
        for name in ("add", "iadd", "sub")
    },
    **{name: {"input": _REQUIRED, "other": _REQUIRED} for name in ("mul", "div")},
    **{name: {"input": _REQUIRED} for name in ("neg", "rsqrt", "sigmoid", "sqrt", "square", "sub")},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation by name, such as mul or octavo::linear, with all its arguments in order."""

    name: str
    args: tuple[Any, ...]


def operation_of(node: Node) -> Operation | None:
    """Returns the operation that a node computes; None if no pass knows it."""
    name = operator_name(node)
    if name is not None:
        return _custom_operation(name, node)
    if node.op == "call_method":
        known = _METHODS.get(str(node.target))
    elif node.op == "call_function" and isinstance(node.target, Callable):  # type: ignore[arg-type]  # an abstract class
        known = _FUNCTIONS.get(node.target)
    else:
        return None
    return None if known is None else _bound(known, _PARAMETERS[known], node)


def named_arguments(node: Node, *names: str) -> dict[str, Any] | None:
    """Returns the arguments of one of these operators of Octavo; None if the node calls none."""
    operation = operation_of(node)
    for name in names:
        if operation is not None and operation.name == f"octavo::{name}":
            schema = getattr(torch.ops.octavo, name).default._schema
            return dict(zip((each.name for each in schema.arguments), operation.args, strict=True))
    return None


def calls(node: Any, name: str) -> bool:
    """Whether a value is a node that computes the named operation."""
    operation = operation_of(node) if isinstance(node, Node) else None
    return operation is not None and operation.name == name


def tensor_of(node: Any) -> torch.Tensor | None:
    """Returns the fake tensor of a node's value; None if it is none."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def without_casts(node: Any) -> Any:
    """Returns the value from which a chain of casts between float dtypes starts."""
    while isinstance(node, Node) and node.op == "call_method" and node.target in CASTS:
        result, source = tensor_of(node), tensor_of(node.args[0])
        if result is None or source is None or result.device != source.device:
            break
        if result.dtype not in _FLOATS or source.dtype not in _FLOATS:
            break
        node = node.args[0]
    return node


def _custom_operation(name: str, node: Node) -> Operation | None:
    target = node.target
    overload = target if isinstance(target, torch._ops.OpOverload) else target.default  # type: ignore[union-attr]  # a packet
    parameters = {
        argument.name: argument.default_value if argument.has_default_value() else _REQUIRED
        for argument in overload._schema.arguments
    }
    return _bound(name, parameters, node)


def _bound(name: str, parameters: Mapping[str, Any], node: Node) -> Operation | None:
    """Returns the operation with its arguments by position; None if they do not fit."""
    if len(node.args) > len(parameters) or not node.kwargs.keys() <= parameters.keys():
        return None
    given = {**parameters, **dict(zip(parameters, node.args, strict=False)), **node.kwargs}
    if any(value is _REQUIRED for value in given.values()):
        return None
    return Operation(name, tuple(given.values()))
