"""Layer normalisation, alone and after a sum."""

import torch
from torch.nn import functional

from models.layers.norm import LayerNorm


def test_a_layer_normalises_rows_and_sums():
    torch.manual_seed(0)
    norm = LayerNorm(8, 1e-3)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x, residual = torch.randn(2, 3, 8)

    def expected(rows):
        return functional.layer_norm(rows, (8,), norm.weight, norm.bias, 1e-3)

    assert torch.equal(norm(x), expected(x))
    total, normed = norm.of_sum(x, residual)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, expected(total))


def test_the_schemas_and_the_fakes_agree_with_the_operators():
    x, residual = torch.randn(2, 3, 8)
    weight, bias = torch.randn(2, 8)
    tests = ("test_schema", "test_faketensor")
    for operator, arguments in (
        (torch.ops.octavo.layer_norm.default, (x, weight, bias, 1e-6)),
        (torch.ops.octavo.add_layer_norm.default, (x, residual, weight, bias, 1e-6)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=tests)
