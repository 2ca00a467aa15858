"""Cuts a traced graph at the operators that must not be compiled."""

from collections.abc import Collection
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitItem:
    """One part of a split graph."""

    submod_name: str
    graph_id: int
    is_splitting_graph: bool
    """Whether it holds splitting operators, which run as they are."""
    graph: GraphModule


def split_graph(
    graph: GraphModule, splitting_ops: Collection[str]
) -> tuple[GraphModule, list[SplitItem]]:
    """Splits a graph at every call of a splitting operator.

    Adjacent splitting operators share one part. Parts run in the order of the graph, as the
    operators write to their arguments.

    Args:
        graph: traced by Dynamo; only the unpacking of tuples moves.
        splitting_ops: operators, as namespace::name.

    Returns:
        The graph of parts, and the parts in order.
    """
    _unpack_at_once(graph)
    part_of: dict[Node, int] = {}
    part, was_splitting = 0, False
    splitting_parts = set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_splitting = operator_name(node) in splitting_ops
        if is_splitting != was_splitting:
            part += 1
            was_splitting = is_splitting
        part_of[node] = part
        if is_splitting:
            splitting_parts.add(part)
    whole = split_module(graph, graph, part_of.__getitem__, keep_original_order=True)
    items = []
    for name, module in whole.named_children():
        assert isinstance(module, GraphModule), "split_module makes nothing else"
        graph_id = int(name.removeprefix("submod_"))
        items.append(
            SplitItem(
                submod_name=name,
                graph_id=graph_id,
                is_splitting_graph=graph_id in splitting_parts,
                graph=module,
            )
        )
    items.sort(key=lambda item: item.graph_id)
    return whole, items


def _unpack_at_once(graph: GraphModule) -> None:
    """Moves the unpacking of each tuple right after its maker: parts exchange only tensors."""
    for node in graph.graph.find_nodes(op="call_function", target=getitem):
        source = node.args[0]
        if isinstance(source, Node) and isinstance(source.meta["example_value"], (tuple, list)):
            source.append(node)


def operator_name(node: Node) -> str | None:
    """Returns the operator that a node calls, as namespace::name, if any.

    Dynamo records the operator with all its overloads or one of them, as in the model.
    """
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return None


def num_calls(graph: GraphModule, operators: Collection[str]) -> int:
    """Returns how often a graph calls any of the operators."""
    return sum(operator_name(node) in operators for node in graph.graph.nodes)
