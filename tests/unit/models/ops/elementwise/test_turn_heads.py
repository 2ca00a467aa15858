"""Rotation of heads."""

import torch

from models.ops.elementwise.turn_heads import turn_heads


def test_a_pair_turns_by_its_angle():
    heads = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
    angles = torch.tensor([[torch.pi / 2, torch.pi]]).repeat(1, 2)
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    expected = torch.tensor([[[0.0, -2.0, 1.0, 0.0]]])
    torch.testing.assert_close(turn_heads(heads, rotation), expected)


def test_the_schema_and_the_fake_agree_with_the_operator():
    arguments = (torch.randn(3, 2, 4), torch.randn(3, 2, 4))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.octavo.turn_heads.default, arguments, test_utils=tests)
