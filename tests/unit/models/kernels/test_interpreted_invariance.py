"""Batch-invariant kernels in Triton's interpreter, on the CPU: right, and the same bits by row.

The interpreter computes tiles by NumPy, so only a GPU can show that its tiles change no bits.
"""

import pytest

from tests.support.programs import run_interpreted

COMMON = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.batch_invariance import use_batch_invariance
from models.kernels.attention.invariant import invariant_parts
from models.kernels.attention.invariant.invariant_attention import attend
from models.kernels.elementwise.rms_norm import rms_norm
from models.kernels.elementwise.rotary import rotary
from models.kernels.products.fixed_linear import fixed_linear
from models.kernels.products.fp8.fp8_linear import quantize
from models.kernels.products.sum_parts import sum_parts
from tests.support.attention_case import Heads, make_case
from tests.support.tolerances import assert_rows_close

ODD = Heads(num_heads=6, num_kv_heads=2, head_dim=12)

def computed(case):
    output = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, transform=case.transform,
        sliding_window=case.sliding_window, sinks=case.sinks, scale=case.q.shape[2] ** -0.5,
        soft_cap=case.soft_cap,
    )
    return output
"""
ATTENTION_PROGRAM = """
CASES = [
    (([1] * 5, [5, 1, 0, 170, 16]), {}),
    (([1, 0, 5, 0], [9, 0, 8, 0]), {}),
    (([33], [33]), {"block_size": 5}),
    (([1, 3, 20], [1200, 530, 600]), {}),
    (([1, 7, 40, 1], [5, 7, 170, 99]), {"sliding_window": 33, "has_sinks": True}),
    (([1, 3], [1200, 530]), {"sliding_window": 600, "has_sinks": True, "soft_cap": 0.7}),
    (([1, 7, 40, 1], [5, 69, 170, 67]), {"sliding_window": -33, "has_sinks": True}),
    (([1, 3], [1150, 602]), {"sliding_window": -600}),
]
# Cases take turns with types; tests/gpu has all of both.
for number, (batch, options) in enumerate(CASES):
    dtype = (torch.float32, torch.float16)[number % 2]
    case = make_case(*batch, ODD, dtype=dtype, has_rotation=False, **options)
    exact = case.exact()
    case.leave_window()
    output = computed(case)
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    assert_rows_close(output[live], exact.run()[live])
    assert output[~live].count_nonzero() == 0
    assert case.metadata.workspace.counters.count_nonzero() == 0
    # One program for all parts of the keys, one for each part, or two for three parts.
    assert torch.equal(output, computed(case.unsplit()))
    invariant_parts._MOST_SPLITS = 2
    assert torch.equal(output, computed(case))
    assert case.metadata.workspace.counters.count_nonzero() == 0
    invariant_parts._MOST_SPLITS = 64
"""
OTHERS_PROGRAM = """
# One kernel for the norms, the rotation and the cache has the bits of three, in both its forms.
use_batch_invariance(is_on=True)
for has_norm in (True, False):
    for counts in ([1, 7], [70]):
        case = make_case(counts, counts, ODD, dtype=torch.float16, has_norm=has_norm)
        transform = case.transform
        q, k = (
            heads if weight is None else rms_norm(heads, weight, transform.eps)
            for heads, weight in ((case.q, transform.q_weight), (case.k, transform.k_weight))
        )
        q, k = (rotary(heads, transform.cos, transform.signed_sin) for heads in (q, k))
        cache = replace(case.cache, k=case.cache.k.clone(), v=case.cache.v.clone())
        apart = replace(case, q=q, k=k, transform=None, cache=cache)
        assert torch.equal(computed(case), computed(apart))
        assert torch.equal(case.cache.k, cache.k)
        assert_rows_close(computed(case), case.exact().run())
use_batch_invariance(is_on=False)

parts = torch.randn(3, 7, 300)
assert torch.equal(sum_parts(parts, torch.float32), parts[0] + parts[1] + parts[2])
torch.manual_seed(0)
for num_tokens, size, num_outputs in [(1, 128, 128), (7, 200, 96), (70, 100, 300)]:
    for dtype in (torch.float32, torch.float16):
        x, weight = (torch.randn(rows, size).to(dtype) for rows in (num_tokens, num_outputs))
        output = fixed_linear(x, weight, dtype=dtype)
        assert_rows_close(output, x.double() @ weight.double().t())
        for row in range(0, num_tokens, max(9, num_tokens // 3)):
            alone = fixed_linear(x[row : row + 1].clone(), weight, dtype=dtype)
            assert torch.equal(alone[0], output[row])
    x = torch.randn(num_tokens, size)
    weight = torch.randn(num_outputs, size).to(torch.float8_e4m3fn)
    blocks = -(-num_outputs // 128), -(-size // 128)
    for scale, is_blocked in ((torch.rand(num_outputs, 1), False), (torch.rand(blocks), True)):
        rounded, x_scale = quantize(x, 128 if is_blocked else size)
        output = fixed_linear(
            rounded, weight, x_scale=x_scale, weight_scale=scale, is_blocked=is_blocked,
            dtype=torch.float32,
        )
        exact = scale.double()
        if is_blocked:
            exact = exact.repeat_interleave(128, 0)[:num_outputs]
            exact = exact.repeat_interleave(128, 1)[:, :size]
            x_scale = x_scale.repeat_interleave(128, 1)[:, :size]
        exact = (rounded.double() * x_scale) @ (weight.double() * exact).t()
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [ATTENTION_PROGRAM, OTHERS_PROGRAM], ids=["attention", "others"]
)
def test_kernels_agree_with_the_reference_in_the_interpreter(program):
    run_interpreted(COMMON + program)
