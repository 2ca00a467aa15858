"""Names graphs by what they compute, so that equal ones are compiled once."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node


def graph_signature(module: GraphModule) -> str:
    """Returns a digest of a graph's operations, constants and kinds of inputs.

    Node names are not included: the pieces of two like layers have the same signature.
    """
    lines = "\n".join(_lines(module, module.graph))
    return hashlib.sha256(lines.encode()).hexdigest()


def has_one_output(graph: GraphModule) -> bool:
    """Returns whether a graph returns one tensor, not a tuple."""
    return not isinstance(graph.graph.output_node().args[0], (tuple, list))


def with_tuple_output(graph: GraphModule) -> GraphModule:
    """Returns a copy of a graph with its one output in a tuple, as compilers require."""
    copy = Graph()
    output = copy.graph_copy(graph.graph, {})
    copy.output((output,))
    return GraphModule(graph, copy)


def _lines(module: GraphModule, graph: Graph) -> list[str]:
    """Formats each node as one line that refers to others by number."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            what = _kind(node.meta["example_value"])
        elif node.op == "get_attr":
            what = _constant(module, str(node.target))
        else:
            arguments = _text((node.args, node.kwargs), number)
            what = f"{_target(node)}{arguments}"
        lines.append(f"{node.op} {what}")
    return lines


def _kind(value: Any) -> str:
    """Describes an input: a tensor by shape and dtype, anything else by its value."""
    if isinstance(value, Tensor):
        form = (value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad)
        return str(form)
    return f"{type(value).__name__} {value}"


def _constant(module: GraphModule, name: str) -> str:
    """Describes a constant: a tensor by content, a graph by its signature."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, GraphModule):
        return graph_signature(value)
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return f"{_kind(value)} {hashlib.sha256(content.tobytes()).hexdigest()}"
    return repr(value)


def _target(node: Node) -> str:
    """Names what a node calls."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _text(value: Any, number: dict[Node, int]) -> str:
    """Formats arguments, nodes among them by number."""
    if isinstance(value, Node):
        return f"%{number[value]}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_text(each, number) for each in value) + ")"
    if isinstance(value, dict):
        items = (f"{key}={_text(each, number)}" for key, each in sorted(value.items()))
        return "{" + ", ".join(items) + "}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), number)}"
    return repr(value)
