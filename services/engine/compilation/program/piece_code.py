"""A part of a traced program as Python code."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from models.ops.custom_op import NAMESPACE, direct_call
from services.engine.compilation.program.graph_signature import (
    graph_signature,
    has_one_output,
    with_tuple_output,
)
from services.engine.compilation.program.own_kernels import only_calls_own_kernels

_GLOBALS = {"torch": torch, "inf": math.inf, "nan": math.nan, "NoneType": type(None)}
_UNUSED = frozenset({"device", "fx_pytree", "pytree"})
"""Names that torch.fx gives all code; a device would name one rank's."""
_OPERATOR = re.compile(rf"torch\.ops\.{NAMESPACE}\.(\w+)(?:\.default)?(?=\()")
_DEVICE = re.compile(r"\bdevice(?=\()")


class UnwritableCodeError(Exception):
    """A graph needs objects besides its inputs."""


class PieceCode(nn.Module):
    """The code of a part; calls of our operators skip torch's dispatcher."""

    def __init__(self, source: str, signature: str | None, has_one_output: bool) -> None:
        """Defines the code.

        Args:
            source: defines the function `forward(self, ...)`.
            signature: of the graph, if a compiler has code to generate for it.
            has_one_output: whether the code returns one tensor, not a tuple.
        """
        super().__init__()
        self.source = source
        self.signature = signature
        self.has_one_output = has_one_output
        names: dict[str, Any] = dict(_GLOBALS)
        names |= {f"_{name}": _operator(name) for name in _OPERATOR.findall(source)}
        exec(_OPERATOR.sub(r"_\1", source), names)  # as loading a compiled piece does
        forward: Callable[..., Any] = names["forward"]
        self.__dict__["forward"] = lambda *args: forward(None, *args)

    @classmethod
    def of(cls, graph: GraphModule, *, is_compiled: bool) -> "PieceCode":
        """Writes a graph as code.

        Args:
            graph: its values are its inputs.
            is_compiled: whether a compiler may replace it.

        Raises:
            UnwritableCodeError: the code would need objects of this process.
        """
        code = graph.graph.python_code("self")
        unknown = code.globals.keys() - _GLOBALS.keys() - _UNUSED
        unknown |= set(_DEVICE.findall(code.src))
        if unknown or graph.graph.find_nodes(op="get_attr"):
            raise UnwritableCodeError(f"its code needs {', '.join(sorted(unknown)) or 'constants'}")
        is_one = has_one_output(graph)
        signature = None
        if is_compiled and not only_calls_own_kernels(graph):
            signature = graph_signature(with_tuple_output(graph) if is_one else graph)
        return cls(code.src, signature, is_one)


def _operator(name: str) -> Callable[..., Any]:
    call = direct_call(getattr(getattr(torch.ops, NAMESPACE), name).default)
    assert call is not None, f"{name} is registered with direct_register_custom_op"
    return call
