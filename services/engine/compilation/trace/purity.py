"""Rejects models whose forward pass has side effects.

A compiled model bypasses Dynamo and a captured graph bypasses Python: an assignment in forward
would happen only once, while it is traced.
"""

import dis
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType

from torch import Tensor
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.fx import GraphModule

_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_GLOBAL"})
_CHANGING_CALLS = frozenset({"update", "clear", "__setattr__", "object_setattr_ignore_descriptor"})
"""How Dynamo's bytecode writes back dictionaries, buffers among them, and attributes."""


class ImpureForwardError(Exception):
    """A model's forward pass changes a buffer, an attribute or a global."""


def check_inputs_are_unchanged(graph: GraphModule) -> None:
    """Raises ImpureForwardError if a traced graph writes to its inputs, buffers included."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if isinstance(value, Tensor) and value._version > 0:
            raise ImpureForwardError(
                f"forward writes to {node.name}. A compiled model must leave its buffers, weights "
                "and arguments as they are: keep state in the forward context."
            )


@contextmanager
def no_side_effects() -> Iterator[None]:
    """Raises ImpureForwardError at the end if a model traced in the block assigns anything."""
    effects: list[str] = []

    def inspect_code(code: CodeType, new_code: CodeType) -> None:
        for instruction in dis.get_instructions(new_code):
            if instruction.opname in _STORES:
                effects.append(str(instruction.argval))
        effects.extend(sorted(_CHANGING_CALLS.intersection(new_code.co_names)))

    handle = register_bytecode_hook(inspect_code)
    try:
        yield
    finally:
        handle.remove()
    if effects:
        raise ImpureForwardError(
            f"forward has side effects ({', '.join(dict.fromkeys(effects))}). A compiled model "
            "must leave its buffers and attributes as they are: keep state in the forward context."
        )
