import pytest
import torch

from models.ops.custom_op import direct_register_custom_op
from services.engine.compilation.compiler_interface import EagerAdaptor
from services.engine.compilation.compiler_manager import CompilerManager
from services.engine.compilation.split_graph import split_graph
from tests.support.compiled_models import Toy, trace


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


def backend_of(body):
    return trace(
        Toy(body), CompilerManager(EagerAdaptor(), {}), torch.ones(5, 4), splitting_ops=OPS
    )


def test_a_graph_is_split_at_packets_and_at_overloads():
    items = backend_of(three_steps).items
    assert [item.is_splitting_graph for item in items] == [False, True, False, True, False]
    assert [item.submod_name for item in items] == [f"submod_{i}" for i in range(5)]


def test_neighbours_share_a_part():
    items = backend_of(neighbours).items
    assert [item.is_splitting_graph for item in items] == [False, True, False]


@pytest.mark.parametrize("body", [three_steps, neighbours])
def test_the_parts_together_compute_what_the_model_does(body):
    backend = backend_of(body)
    x = torch.randn(3, 4)
    args = [3, x] if len(backend.traced_call.args) == 2 else [x]
    torch.testing.assert_close(backend.whole(*args)[0], body(None, x))


def test_without_operators_to_split_at_the_graph_is_one_part():
    graph = backend_of(three_steps).graph
    _, items = split_graph(graph, ())
    assert [item.is_splitting_graph for item in items] == [False]


def test_a_backend_takes_one_trace():
    backend = backend_of(three_steps)
    with pytest.raises(RuntimeError, match="traced a second time"):
        backend(backend.graph, [])
