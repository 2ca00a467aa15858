"""Passes around attention leave a step's results and its cache as they are, for any shape."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.compile_support import support_torch_compile
from models.kv_cache import KVCacheSpec
from models.layers.attention import Attention
from models.number_formats import BLOCK, FP8
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import rotary
from models.ops.products.linear import linear
from tests.support.compiled_models import compile_at
from tests.support.paged_runner import PagedRunner

EPS = 1e-5
VOCAB = 20


@support_torch_compile({"input_ids": 0, "positions": 0})
class Attending(nn.Module):
    """Embedded tokens attend to each other; a product follows."""

    def __init__(self, num_kv_heads, group_size, head_dim, num_outputs, *, seed, dtype):
        super().__init__()
        num_heads = num_kv_heads * group_size
        self.head_dim, self.dtype = head_dim, dtype
        self.spec = KVCacheSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.attention = Attention(0)
        draws = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=draws).to(dtype)

        width = num_heads * head_dim
        self.register_buffer("embedding", draw(VOCAB, width + 2 * num_kv_heads * head_dim))
        self.register_buffer("frequencies", draw(head_dim // 2))
        self.register_buffer("q_norm", draw(head_dim))
        self.register_buffer("k_norm", draw(head_dim))
        self.weight, self.scale = draw(num_outputs, width), None
        self.has_norms = False

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(input_ids, positions)
        return linear(self.attention(q, k, v), self.weight, None, self.scale)

    def heads(self, input_ids, positions):
        heads = self.embedding[input_ids].view(input_ids.shape[0], -1, self.head_dim)
        sizes = [self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads]
        q, k, v = heads.split_with_sizes(sizes, dim=1)
        if self.has_norms:
            q, k = rms_norm(q, self.q_norm, EPS), rms_norm(k, self.k_norm, EPS)
        angles = positions.view(-1, 1, 1).to(self.dtype) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return rotary(q, cos, signed_sin), rotary(k, cos, signed_sin), v

    def cache_specs(self):
        return [self.spec]

    def compute_logits(self, hidden):
        return hidden


def run(model, lengths):
    """Runs mixed steps of sequences; returns what they compute and what they cache."""
    runner = PagedRunner(model)
    sequences = [
        runner.add([(7 * i + length) % VOCAB for i in range(length)]) for length in lengths
    ]
    results = []
    while any(len(each.token_ids) > each.num_cached for each in sequences):
        left = [(each, len(each.token_ids) - each.num_cached) for each in sequences]
        results += runner.step([(each, min(num, 5)) for each, num in left if num])
    return results + [part for each in sequences for part in runner.cached(each, 0)]


lengths = st.lists(st.integers(1, 17), min_size=1, max_size=4)
counts = st.integers(1, 3)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_attention_that_rotates_heads_changes_no_result(data):
    head_dim = 2 * data.draw(st.integers(1, 9))
    seed, num_outputs = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 40))
    shape = (data.draw(counts), data.draw(counts), head_dim, num_outputs)
    model = Attending(*shape, seed=seed, dtype=torch.float32)
    model.has_norms = data.draw(st.booleans())
    fused = copy.copy(model)
    stats = compile_at(3, passes=["qk_norm_rope_cache"])(fused)
    assert stats.pass_matches == {"qk_norm_rope_cache": 1}
    steps = data.draw(lengths)
    for actual, expected in zip(run(fused, steps), run(model, steps), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_attention_that_rounds_its_output_changes_no_result(dtype, data):
    # One output of one head has one scale, by row as well as by block.
    num_outputs, seed = data.draw(st.integers(2, 300)), data.draw(st.integers(0, 99))
    model = Attending(data.draw(counts), data.draw(counts), BLOCK, num_outputs, seed=seed,
                      dtype=dtype)  # fmt: skip
    model.weight = model.weight.to(FP8)
    draws = torch.Generator().manual_seed(seed)
    model.scale = torch.rand(-(-num_outputs // BLOCK), model.weight.shape[1] // BLOCK,
                             generator=draws)  # fmt: skip
    fused = copy.copy(model)
    stats = compile_at(3, passes=["attention_quant"])(fused)
    assert stats.pass_matches == {"attention_quant": 1}
    steps = data.draw(lengths)
    for actual, expected in zip(run(fused, steps), run(model, steps), strict=True):
        torch.testing.assert_close(actual, expected)
