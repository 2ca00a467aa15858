"""Products with tanh's GELU."""

import torch
from torch.nn import functional

from models.ops.products.gelu_linear import gelu_linear


def test_the_activation_follows_product_and_bias():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    expected = functional.gelu(x @ weight.t() + bias, approximate="tanh")
    torch.testing.assert_close(gelu_linear(x, weight, bias), expected)


def test_the_schema_and_the_fake_agree_with_the_operator():
    arguments = (torch.randn(3, 8), torch.randn(5, 8), torch.randn(5))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.octavo.gelu_linear.default, arguments, test_utils=tests)
