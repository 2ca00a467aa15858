"""Attention rotates heads itself only where its kernels find every token's heads and rotation."""

import pytest
import torch
from torch import nn

from models.compile_support import support_torch_compile
from models.layers.attention import Attention
from models.ops.elementwise.rotary import rotary
from tests.support.compiled_models import compile_toy

HEAD = 8
WIDTH = 6 * HEAD + 4


@support_torch_compile()
class Model(nn.Module):
    """Attention of two query heads to one kv head, all cut out of the input by a body."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.attention = Attention(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, cos, sin = self.body(x * 2)
        return self.attention(rotary(q, cos, sin), rotary(k, cos, sin), v)


def cut(rows, table):
    q, k, v = rows.view(rows.shape[0], -1, HEAD).split_with_sizes([2, 1, 1], dim=1)
    return q, k, v, *table.unsqueeze(1).chunk(2, dim=-1)


def whole_heads(x):
    return cut(x[:, : 4 * HEAD].clone(), x[:, : 2 * HEAD].clone())


def tokens_between_heads(x):
    return cut(x[:, : 4 * HEAD], x[:, : 2 * HEAD].clone())


def values_between_heads(x):
    q, k, _, cos, sin = whole_heads(x)
    return q, k, x[:, :HEAD].unsqueeze(1), cos, sin


def rotations_between_heads(x):
    return cut(x[:, : 4 * HEAD].clone(), x[:, : 2 * HEAD])


def two_tables(x):
    q, k, v, cos, sin = whole_heads(x)
    return q, k, v, cos, sin.clone()


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (whole_heads, 1),
        (tokens_between_heads, 0),
        (values_between_heads, 0),
        (rotations_between_heads, 0),
        (two_tables, 0),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_tokens_are_whole_heads_apart(body, count):
    stats = compile_toy(Model(body), 2, width=WIDTH, passes=["qk_norm_rope_cache"])
    assert stats.pass_matches["qk_norm_rope_cache"] == count
