import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.ops.custom_op import direct_register_custom_op, interrupted


def add_into(x: torch.Tensor, output: torch.Tensor, times: int) -> None:
    output.copy_(x * times)


def test_registered_function_is_callable_with_its_schema_and_tags():
    library = torch.library.Library("octavo_test", "FRAGMENT")
    direct_register_custom_op(
        "add_into",
        add_into,
        mutates_args=("output",),
        fake_impl=lambda x, output, times: None,
        target_lib=library,
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    operator = torch.ops.octavo_test.add_into.default
    output = torch.zeros(2)
    operator(torch.ones(2), output, 3)
    assert output.tolist() == [3, 3]
    written = [a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["output"]
    assert torch.Tag.needs_fixed_stride_order in operator.tags
    with torch.device("meta"):
        operator(torch.empty(2), torch.empty(2), 3)


def test_function_without_annotations_is_refused():
    with pytest.raises(ValueError, match="type annotation"):
        direct_register_custom_op("untyped", lambda x: None, mutates_args=())


@pytest.fixture(scope="module")
def library():
    return torch.library.Library("octavo_interrupted_test", "FRAGMENT")


@pytest.fixture(scope="module")
def call(library):
    return direct_register_custom_op(
        "add_into", add_into, ("output",), lambda x, output, times: None, library
    )


def ways(call):
    return [call, torch.ops.octavo_interrupted_test.add_into]


def test_either_way_of_calling_can_be_interrupted_and_continued_later(call):
    for way in ways(call):
        x, output, taken = torch.ones(2), torch.zeros(2), []
        operators = {"octavo_interrupted_test::add_into"}
        with interrupted(operators, lambda *call, taken=taken: taken.append(call)):
            way(x, output, 3)
        assert output.tolist() == [0, 0]
        ((resume, args),) = taken
        resume(*args)
        assert output.tolist() == [3, 3]


def test_other_operators_run_during_an_interruption(call):
    for way in ways(call):
        output = torch.zeros(2)
        with interrupted({"octavo_interrupted_test::other"}, lambda *call: None):
            way(torch.ones(2), output, 3)
        assert output.tolist() == [3, 3]


def test_an_interruption_that_fails_is_over(call):
    def refuse(resume, args):
        raise ValueError("planted")

    output = torch.zeros(2)
    with (
        pytest.raises(ValueError, match="planted"),
        interrupted({"octavo_interrupted_test::add_into"}, refuse),
    ):
        call(torch.ones(2), output, 3)
    call(torch.ones(2), output, 3)
    assert output.tolist() == [3, 3]


def test_a_dispatch_mode_sees_the_operator(call):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        call(torch.ones(2), torch.zeros(2), 3)
    assert torch.ops.octavo_interrupted_test.add_into.default in seen


def test_a_compiler_traces_the_operator(call):
    def program(x):
        output = torch.zeros_like(x)
        call(x, output, 3)
        return output

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(program, backend=keep, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    (graph,) = graphs
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.octavo_interrupted_test.add_into.default in targets
