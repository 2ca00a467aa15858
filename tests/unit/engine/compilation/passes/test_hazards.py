"""Operators that write in place leave every value that something else reads."""

import copy

import pytest
import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear
from tests.support.compiled_models import compile_toy

EPS = 1e-5
WIDTH = 6


@support_torch_compile()
class Model(nn.Module):
    """Runs a body with two weights and a norm's weight."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("first", torch.randn(WIDTH, WIDTH))
        self.register_buffer("second", torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)

    def norm(self, x):
        return rms_norm(x, self.scale, EPS)


def input_is_the_residual(model, x):
    return model.norm(x + linear(x * 2, model.first, None))


def view_of_the_input_is_the_residual(model, x):
    return model.norm(x.view(-1, WIDTH) + linear(x * 2, model.first, None))


def old_residual_is_read_later(model, x):
    residual = x * 2
    total = residual + linear(x, model.first, None)
    return model.norm(total) + total + residual


def view_of_the_old_residual_is_read_later(model, x):
    residual = x * 2
    half = residual[:, : WIDTH // 2]
    total = model.norm(residual + linear(x, model.first, None))
    return total[:, : WIDTH // 2] + half


def product_of_the_residual_itself(model, x):
    residual = x * 2
    return model.norm(residual + linear(residual, model.first, None))


def residual_added_to_itself(model, x):
    residual = x * 2
    return model.norm(residual + residual)


def broadcast_residual(model, x):
    residual = (model.scale * 2).expand(x.shape[0], WIDTH)
    return model.norm(residual + linear(x, model.first, None))


def row_as_residual(model, x):
    return model.norm(model.scale + linear(x, model.first, None))


def product_of_another_dtype(model, x):
    residual = (x * 2).double()
    return model.norm((residual + linear(x, model.first, None)).float())


def sum_is_changed_before_the_norm(model, x):
    total = x * 2 + linear(x, model.first, None)
    total.mul_(3)
    return model.norm(total)


def input_of_the_product_is_changed_before_the_sum(model, x):
    inner = x * 2
    product = linear(inner, model.first, None)
    inner.add_(1)
    return model.norm(inner * 3 + product) + inner


def input_of_the_norm_is_changed_before_the_product(model, x):
    inner = x * 2
    normed = model.norm(inner)
    inner.add_(1)
    return linear(normed, model.first, None) + inner


def norm_with_two_users(model, x):
    normed = model.norm(x * 2)
    return linear(normed, model.first, None) + linear(normed, model.second, None)


def product_with_two_users(model, x):
    product = linear(x, model.first, None)
    return silu_and_mul(product) + product[:, : WIDTH // 2]


def residual_in_place(model, x):
    residual = x * 2
    other = residual
    residual += linear(x, model.first, None)
    return model.norm(residual) + other


def residual_in_place_with_its_own_product(model, x):
    residual = x * 2
    residual += linear(residual, model.first, None)
    return model.norm(residual)


def scaled_sum(model, x):
    return model.norm(torch.add(x * 2, linear(x, model.first, None), alpha=3))


def two_sums_of_one_residual(model, x):
    residual = x * 2
    first = residual + linear(x, model.first, None)
    second = residual + linear(x, model.second, None)
    return model.norm(first) + model.norm(second)


def weight_made_after_the_sum(model, x):
    total = x * 2 + linear(x, model.first, None)
    return rms_norm(total, model.scale + total.mean() * 0, EPS)


BODIES = [each for each in list(globals().values()) if getattr(each, "__module__", None) == __name__
          and callable(each) and not isinstance(each, type)]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_graph_with_a_hazard_computes_the_same(body):
    model = Model(body)
    fused = copy.copy(model)
    compile_toy(fused, 2, width=WIDTH)
    for num_tokens in (1, 5):
        x = torch.randn(num_tokens, WIDTH)
        before = x.clone()
        torch.testing.assert_close(fused.forward(x), body(model, x.clone()))
        assert torch.equal(x, before)
