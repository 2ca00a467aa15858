import pytest
import torch

from models.ops.custom_op import direct_register_custom_op
from services.engine.compilation.pieces.compiler_interface import EagerAdaptor
from services.engine.compilation.pieces.compiler_manager import CompilerManager
from services.engine.compilation.program.split_graph import split_graph
from services.engine.compilation.trace.backend import OctavoBackend, trace_model
from tests.support.compiled_models import Toy, linked, traced_program


def add_one_into(x: torch.Tensor, output: torch.Tensor) -> None:
    """Writes x + 1."""
    output.copy_(x + 1)


OPS = ("octavo::test_add_one_into",)


@pytest.fixture(scope="module", autouse=True)
def op():
    direct_register_custom_op(
        "test_add_one_into", add_one_into, ("output",), fake_impl=lambda x, output: None
    )
    return torch.ops.octavo.test_add_one_into


def add_one(x, *, overload=False):
    output = torch.empty_like(x)
    call = torch.ops.octavo.test_add_one_into
    (call.default if overload else call)(x, output)
    return output


def three_steps(_, x):
    return add_one(add_one(x * 2) * 3, overload=True) * 5


def neighbours(_, x):
    first, second = torch.empty_like(x), torch.empty_like(x)
    torch.ops.octavo.test_add_one_into(x, first)
    torch.ops.octavo.test_add_one_into(first, second)
    return second * 2


def program_of(body):
    return traced_program(Toy(body), torch.ones(5, 4), splitting_ops=OPS)


def test_a_graph_is_split_at_packets_and_at_overloads():
    items = [part.item for part in program_of(three_steps).parts]
    assert [item.is_splitting_graph for item in items] == [False, True, False, True, False]
    assert [item.submod_name for item in items] == [f"submod_{i}" for i in range(5)]


def test_neighbours_share_a_part():
    items = [part.item for part in program_of(neighbours).parts]
    assert [item.is_splitting_graph for item in items] == [False, True, False]


@pytest.mark.parametrize("body", [three_steps, neighbours])
def test_the_parts_together_compute_what_the_model_does(body):
    forward = linked(program_of(body), CompilerManager(EagerAdaptor(), {}))
    x = torch.randn(3, 4)
    torch.testing.assert_close(forward(x), body(None, x))


def test_without_operators_to_split_at_the_graph_is_one_part():
    graph = trace_model(Toy(three_steps), [torch.ones(5, 4)]).graph
    _, items = split_graph(graph, ())
    assert [item.is_splitting_graph for item in items] == [False]


def test_a_backend_takes_one_trace():
    graph = trace_model(Toy(three_steps), [torch.ones(5, 4)]).graph
    backend = OctavoBackend()
    backend(graph, ())
    with pytest.raises(RuntimeError, match="a second time"):
        backend(graph, ())
