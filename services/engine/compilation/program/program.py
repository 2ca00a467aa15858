"""A traced model as a list of parts, each with the values that it takes.

A trace of a few layers becomes the program of all: parts between layers of the same kinds are
repeated with each layer's weights.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import SymInt, Tensor, nn
from torch.fx import Graph, GraphModule, Node

from services.engine.compilation.program.split_graph import SplitItem, split_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced forward pass.

    graph: its placeholders are the weights, the inputs and symbolic sizes.
    args: the traced value of each placeholder.
    inputs: the traced inputs.
    """

    graph: GraphModule
    args: tuple[Any, ...]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A tensor of the model, the same at every step."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeight:
    """A tensor of one layer, by its name in the layer."""

    layer: int
    name: str


@dataclass(frozen=True, slots=True)
class Input:
    """One of the model's inputs."""

    number: int


@dataclass(frozen=True, slots=True)
class InputSize:
    """A dimension of one of the model's inputs."""

    number: int
    dim: int


@dataclass(frozen=True, slots=True)
class Output:
    """An output of an earlier part; index None: its only one."""

    part: int
    index: int | None


Value = Weight | LayerWeight | Input | InputSize | Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a program: its graph, shared by parts that are alike, and the values it takes."""

    item: SplitItem
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parts of a forward pass in order, and the value that it returns."""

    parts: tuple[Part, ...]
    result: Value

    @property
    def num_pieces(self) -> int:
        """Parts that are not splitting operators."""
        return sum(not part.item.is_splitting_graph for part in self.parts)


class CannotRepeatError(Exception):
    """The parts of the traced layers do not follow one pattern."""


def read_program(
    trace: Trace, splitting_ops: Sequence[str], layers: Sequence[nn.Module] = ()
) -> Program:
    """Splits a trace at some operators and names each value.

    Args:
        trace: of a model.
        splitting_ops: as namespace::name.
        layers: the traced layers, whose weights are named by layer.
    """
    whole, items = split_graph(trace.graph, splitting_ops)
    names = _Names(trace, layers)
    part_of = {item.submod_name: number for number, item in enumerate(items)}
    number_of = {
        node.name: number
        for number, node in enumerate(trace.graph.graph.find_nodes(op="placeholder"))
    }

    def value(node: Any) -> Value:
        assert isinstance(node, Node), "parts take and return the values of nodes"
        if node.op == "placeholder":
            return names.value(number_of[node.name])
        if node.op == "call_module":
            return Output(part_of[str(node.target)], None)
        source, index = node.args
        assert isinstance(source, Node), "split_module unpacks the outputs of parts"
        assert isinstance(index, int), "split_module unpacks the outputs of parts"
        return Output(part_of[str(source.target)], index)

    calls = {str(node.target): node for node in whole.graph.find_nodes(op="call_module")}
    parts = [
        Part(item=item, values=tuple(value(arg) for arg in calls[item.submod_name].args))
        for item in items
    ]
    result = whole.graph.output_node().args[0]
    if isinstance(result, (tuple, list)):
        (result,) = result
    return Program(parts=tuple(parts), result=value(result))


class _Names:
    """Names the placeholders of a trace."""

    def __init__(self, trace: Trace, layers: Sequence[nn.Module]) -> None:
        self._trace = trace
        nodes = trace.graph.graph.find_nodes(op="placeholder")
        self._kinds = [node.meta["example_value"] for node in nodes]
        self._values: dict[int, Value] = {}
        self._layer_weights: dict[int, LayerWeight] = {}
        for number, layer in enumerate(layers):
            for name, tensor in tensors_of(layer).items():
                self._layer_weights[id(tensor)] = LayerWeight(number, name)

    def value(self, slot: int) -> Value:
        """Returns the value of a placeholder, by its number."""
        if slot not in self._values:
            self._values[slot] = self._find(slot)
        return self._values[slot]

    def _find(self, slot: int) -> Value:
        kind, given = self._kinds[slot], self._trace.args[slot]
        if isinstance(kind, SymInt):
            return self._size(kind)
        for number, each in enumerate(self._trace.inputs):
            if given is each:
                return Input(number)
        return self._layer_weights.get(id(given)) or Weight(given)

    def _size(self, size: SymInt) -> InputSize:
        for slot, kind in enumerate(self._kinds):
            if isinstance(kind, SymInt):
                continue
            given = self.value(slot)
            if not isinstance(given, Input):
                continue
            for dim, other in enumerate(kind.shape):
                if isinstance(other, SymInt) and other.node.expr == size.node.expr:
                    return InputSize(given.number, dim)
        raise AssertionError(f"no input has the size {size}")


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a layer by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def repeat_layers(
    program: Program, traced: Sequence[Hashable], kinds: Sequence[Hashable]
) -> Program:
    """Makes the program of all layers from that of a few.

    Parts alternate: a piece, the splitting operator of a layer, a piece, and so on. Each layer's
    part and the piece after it are those of a traced layer of the same kind, whose neighbours are
    of the same kinds too; see `layer_kinds.layers_to_trace`.

    Args:
        program: of the traced layers; its LayerWeights count them.
        traced: kinds of the traced layers.
        kinds: kinds of all layers; the first two are the first two traced.

    Raises:
        CannotRepeatError: the parts do not alternate, or one takes a value of a part that is
            neither near nor the first.
    """
    for number, part in enumerate(program.parts):
        if part.item.is_splitting_graph != bool(number % 2):
            raise CannotRepeatError(f"part {number} is out of turn")
    if len(program.parts) != 2 * len(traced) + 1:
        raise CannotRepeatError(f"{len(traced)} layers have {len(program.parts)} parts")
    repeated = _Repeated(program, traced, kinds)
    parts = [repeated.part(number) for number in range(2 * len(kinds) + 1)]
    last = repeated.moved(program.result, len(program.parts) - 1, len(parts) - 1)
    return Program(parts=tuple(parts), result=last)


@dataclass(slots=True)
class _Repeated:
    program: Program
    traced: Sequence[Hashable]
    kinds: Sequence[Hashable]
    _models: dict[int, int] = field(default_factory=dict)

    def part(self, number: int) -> Part:
        """Returns one part of all; parts 2 * i are before layer i, 2 * i + 1 are its own."""
        layer, is_own = divmod(number, 2)
        model = self._model_of(layer, is_own=bool(is_own))
        like = self.program.parts[2 * model + is_own]
        self._models[number] = 2 * model + is_own
        values = [self.moved(value, 2 * model + is_own, number) for value in like.values]
        item = _for_layer(like.item, layer) if is_own else like.item
        return Part(item=replace(item, submod_name=f"submod_{number}"), values=tuple(values))

    def moved(self, value: Value, source: int, number: int) -> Value:
        """Returns what a traced part's value is for part `number`, which repeats part `source`."""
        distance = number - source
        if isinstance(value, LayerWeight):
            if value.layer not in (source // 2, (source - 1) // 2):
                raise CannotRepeatError(f"part {source} uses a weight of layer {value.layer}")
            return LayerWeight(value.layer + distance // 2, value.name)
        if not isinstance(value, Output) or value.part == 0:
            return value
        if source - value.part > 2:
            raise CannotRepeatError(f"part {source} uses an output of part {value.part}")
        moved = Output(value.part + distance, value.index)
        if self._kind(value) != self._kind(Output(self._models[moved.part], value.index)):
            raise CannotRepeatError(f"part {number} would get another kind of value")
        return moved

    def _model_of(self, layer: int, *, is_own: bool) -> int:
        """Returns the traced layer like this one; for the piece after the last layer, the last."""
        traced, kinds = self.traced, self.kinds
        if layer == len(kinds):
            return len(traced)
        if layer < 2:
            return layer
        for model in range(2, len(traced)):
            if traced[model] != kinds[layer]:
                continue
            if is_own or traced[model - 1] == kinds[layer - 1]:
                return model
        raise CannotRepeatError(f"no traced layer is like layer {layer}")

    def _kind(self, output: Output) -> tuple[Any, ...]:
        """Returns the form of a part's output."""
        made = self.program.parts[output.part].item.graph.graph.output_node().args[0]
        node = made if output.index is None else made[output.index]  # type: ignore[index]  # a tuple
        example = node.meta["example_value"]  # type: ignore[union-attr]  # parts return nodes
        if isinstance(example, Tensor):
            return (example.dtype, str(example.shape), str(example.stride()))
        return (str(example),)


def _for_layer(item: SplitItem, layer: int) -> SplitItem:
    """Returns a part whose splitting operators name another layer."""
    graph = Graph()
    graph.output(graph.graph_copy(item.graph.graph, {}))
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [each.name for each in schema.arguments] if schema else []
        if "layer_index" in names:
            node.update_arg(names.index("layer_index"), layer)
    return replace(item, graph=GraphModule(item.graph, graph))
