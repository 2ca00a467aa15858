import pytest
import torch

from models.ops.custom_op import direct_register_custom_op


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
