import pytest
import torch
from torch import nn

from models.compile_support import dynamic_arg_dims_of, support_torch_compile
from models.layers.decoder import CausalLM
from models.qwen3 import Qwen3ForCausalLM


class Model(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        return x if mask is None else x * mask * scale


def declared(dynamic_arg_dims=None):
    model_class = support_torch_compile(dynamic_arg_dims)(type("Declared", (Model,), {}))
    return dict(dynamic_arg_dims_of(model_class()))


def test_without_a_declaration_every_tensor_varies_in_its_first_dimension():
    assert declared() == {"x": (0,), "mask": (0,)}


def test_dimensions_may_be_one_or_many():
    assert declared({"x": -1, "mask": [0, 1]}) == {"x": (-1,), "mask": (0, 1)}


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="takes no y"):
        declared({"y": 0})


def test_a_forward_without_tensors_is_refused():
    with pytest.raises(ValueError, match="takes no tensor"):
        declared({})


def test_a_model_inherits_the_declaration():
    assert issubclass(Qwen3ForCausalLM, CausalLM)
    dims = dynamic_arg_dims_of(object.__new__(Qwen3ForCausalLM))
    assert dict(dims) == {"input_ids": (0,), "positions": (0,)}


def test_a_model_without_one_is_refused_with_advice():
    with pytest.raises(ValueError, match="--enforce-eager"):
        dynamic_arg_dims_of(nn.Linear(1, 1))
