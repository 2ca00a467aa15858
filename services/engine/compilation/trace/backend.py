"""Traces a model once with Dynamo, for any number of tokens."""

import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.fx import GraphModule

from models.compile_support import DynamicArgDims, dynamic_arg_dims_of
from services.engine.compilation.program.compile_range import TYPICAL_NUM_TOKENS
from services.engine.compilation.program.program import Trace

_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_GLOBAL"})
_CHANGING_CALLS = frozenset({"update", "clear", "__setattr__", "object_setattr_ignore_descriptor"})
"""How Dynamo's bytecode writes back dictionaries, buffers among them, and attributes."""


class OctavoBackend:
    """A torch.compile backend that keeps a model's graph; it can be called once.

    It computes nothing: tracing has no cache and no forward context to run the model.
    """

    def __init__(self) -> None:
        self.graph: GraphModule | None = None
        self.args: tuple[Any, ...] = ()
        """The traced value of each placeholder of the graph."""
        self.num_outputs = 0

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keeps a traced graph; Dynamo calls `run` in its place."""
        del example_inputs  # the graph's metadata has them
        if self.graph is not None:
            raise RuntimeError(
                "the model was traced a second time; a backend compiles one model for one trace"
            )
        self.graph = graph
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list)), "Dynamo's graphs return a tuple"
        self.num_outputs = len(outputs)
        return self.run

    def run(self, *args: Any) -> Sequence[Any]:
        """Keeps the arguments; returns an empty tensor for each output."""
        self.args = args
        return (torch.empty(0),) * self.num_outputs


def trace_model(model: nn.Module, inputs: Sequence[Tensor]) -> Trace:
    """Traces a model's forward pass; the model is unchanged and may run meanwhile.

    Args:
        model: its class declares @support_torch_compile.
        inputs: arguments of forward with the kinds of a step's, any content.

    Raises:
        ValueError: the model declares nothing, or does not return one tensor.
        ImpureForwardError: its forward changes buffers, attributes or globals.
    """
    mark_num_tokens(inspect.signature(model.forward), dynamic_arg_dims_of(model), inputs)
    backend = OctavoBackend()
    try:
        with torch.no_grad(), no_side_effects(), _constants_stay_constants():
            torch.compile(model.forward, backend=backend, fullgraph=True)(*inputs)
    finally:
        # Dynamo's own dispatch is never used again. Its `reset` would import Inductor on a GPU.
        torch._dynamo.reset_code_caches()
    assert backend.graph is not None, "tracing calls the backend"
    if backend.num_outputs != 1:
        raise ValueError(f"forward returns {backend.num_outputs} tensors; it must return one")
    check_inputs_are_unchanged(backend.graph)
    return Trace(graph=backend.graph, args=backend.args, inputs=tuple(inputs))


def _constants_stay_constants() -> AbstractContextManager[None]:
    """Keeps numbers of the model, such as a norm's eps, out of the graph's inputs.

    Dynamo makes a symbol of a number that differs from the one it saw for another model.
    """
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, specialize_float=True
    )
    return patched


def mark_num_tokens(
    signature: inspect.Signature, dynamic_dims: DynamicArgDims, inputs: Sequence[Tensor]
) -> None:
    """Makes the number of tokens a symbol without any bound, not even above 1."""
    arguments = signature.bind(*inputs).arguments
    for name, dims in dynamic_dims.items():
        tensor = arguments.get(name)
        if not isinstance(tensor, Tensor):
            continue
        for dim in dims:
            torch._dynamo.decorators.mark_unbacked(
                tensor, dim % tensor.dim(), shape_id="num_tokens", hint_override=TYPICAL_NUM_TOKENS
            )


class ImpureForwardError(Exception):
    """A model's forward pass changes a buffer, an attribute or a global.

    A compiled model bypasses Dynamo and a captured graph bypasses Python: an assignment in forward
    would happen only once, while it is traced.
    """


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
