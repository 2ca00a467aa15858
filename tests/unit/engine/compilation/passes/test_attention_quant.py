"""Attention rounds its output only where one product of an FP8 weight by block reads all of it."""

import pytest
import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.layers.attention import Attention
from models.number_formats import BLOCK, FP8
from models.ops.products.linear import linear
from tests.support.compiled_models import compile_toy

NUM_HEADS, SIZE = 2, 2 * BLOCK


@support_torch_compile()
class Model(nn.Module):
    """Attention of a stream to itself, then a body with weights by block and by row."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.attention = Attention(0)
        self.register_buffer("weight", torch.randn(SIZE, SIZE).to(FP8))
        self.register_buffer("column", torch.randn(SIZE, BLOCK).to(FP8))
        self.register_buffer("blocks", torch.rand(2, 2))
        self.register_buffer("column_blocks", torch.rand(2, 1))
        self.register_buffer("rows", torch.rand(SIZE, 1))
        self.register_buffer("plain", torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x * 2).view(-1, NUM_HEADS, BLOCK)
        return self.body(self, x, self.attention(heads, heads, heads))


def product(model, x, attended):
    return linear(attended, model.weight, None, model.blocks)


def product_added_to_the_stream(model, x, attended):
    return x * 3 + linear(attended, model.weight, None, model.blocks)


def two_products(model, x, attended):
    return product(model, x, attended) + product(model, x, attended)


def output_is_read_besides(model, x, attended):
    return product(model, x, attended) + attended


def output_is_gated(model, x, attended):
    return product(model, x, attended * torch.sigmoid(x))


def output_is_changed(model, x, attended):
    attended.mul_(2)
    return product(model, x, attended)


def product_of_one_head(model, x, attended):
    return linear(attended[:, :BLOCK], model.column, None, model.column_blocks)


def product_of_heads_as_rows(model, x, attended):
    rows = attended.view(-1, BLOCK)
    return linear(rows, model.column, None, model.column_blocks)


def product_of_later_tokens(model, x, attended):
    return product(model, x, attended[1:])


def product_of_some_tokens(model, x, attended):
    return product(model, x, attended[: attended.shape[0] // 2])


def product_by_row(model, x, attended):
    return linear(attended, model.weight, None, model.rows)


def product_of_a_plain_weight(model, x, attended):
    return linear(attended, model.plain, None)


def no_product(model, x, attended):
    return x + attended


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (product, 1),
        (product_added_to_the_stream, 1),
        (two_products, 0),
        (output_is_read_besides, 0),
        (output_is_gated, 0),
        (output_is_changed, 0),
        (product_of_one_head, 0),
        (product_of_heads_as_rows, 0),
        (product_of_later_tokens, 0),
        (product_of_some_tokens, 0),
        (product_by_row, 0),
        (product_of_a_plain_weight, 0),
        (no_product, 0),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_only_a_product_that_is_the_single_reader_gets_rounded_heads(body, count):
    stats = compile_toy(Model(body), 2, width=SIZE, passes=["linear_residual", "attention_quant"])
    assert stats.pass_matches["attention_quant"] == count
