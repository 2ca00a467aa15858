"""The tensors of attention that a replay compares."""

from dataclasses import replace

import torch

from models.forward_context import forward_context
from models.ops.products.fp8_linear import round_in_place
from services.engine.replay.taps import AttentionTaps
from tests.support.attention_case import Heads, make_case

HEADS = Heads(num_heads=2, num_kv_heads=1, head_dim=128)


def test_attention_that_rounds_its_output_shows_it_as_it_was_before():
    plain = make_case([3, 1], [5, 9], HEADS, has_rotation=False)
    expected = plain.run()
    rounding = replace(make_case([3, 1], [5, 9], HEADS, has_rotation=False), rounds=True)
    output = torch.empty_like(expected)
    with AttentionTaps() as taps, forward_context(rounding.context()):
        torch.ops.octavo.unified_attention_with_output(*rounding.arguments(output))
    assert torch.equal(taps.tensors[0, 0, "output"], expected)
    round_in_place(expected)
    assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8))
