"""The kernels of experts in Triton's interpreter, on the CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which CPU installs leave out"
)

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.ops import moe as reference
from models.ops.triton import moe as kernels
from models.ops.triton.moe_grouped import apply_grouped
from models.ops.triton.moe_pairs import apply_pairs
from models.ops.triton.moe_routing import sort_by_expert
from tests.support.moe_case import NUM_EXPERTS, ROUTINGS, exactly, make_experts, make_logits
from tests.support.tolerances import assert_rows_close

for routing in ROUTINGS.values():
    for num_tokens in (1, 13):
        logits, bias = make_logits(num_tokens, routing)
        weights, ids = reference.route(logits, bias, routing)
        actual_weights, actual_ids = kernels.route(logits, bias, routing)
        assert torch.equal(ids, actual_ids.long())
        torch.testing.assert_close(weights, actual_weights)
        pairs, starts = sort_by_expert(actual_ids, NUM_EXPERTS)
        assert torch.equal(pairs.long(), ids.flatten().argsort(stable=True))
        counts = ids.flatten().bincount(minlength=NUM_EXPERTS)
        assert torch.equal(starts.diff().long(), counts)
routing = ROUTINGS["softmax"]
for dtype, is_clamped in ((torch.float32, True), (torch.float16, False)):
    for num_tokens in (1, 13):
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        hidden = torch.randn(num_tokens, 36).to(dtype)
        experts = make_experts(dtype=dtype, is_clamped=is_clamped)
        exact = reference.apply_experts(hidden.double(), weights.double(), ids, exactly(experts))
        for apply in (apply_pairs, apply_grouped):
            assert_rows_close(apply(hidden, weights, ids.int(), experts), exact)
"""

QUANTIZED_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.ops import moe as reference
from models.ops.triton.moe_grouped_quantized import apply_grouped_quantized
from models.ops.triton.moe_pairs_quantized import apply_pairs_quantized
from tests.support.moe_case import ROUTINGS, exactly, make_logits, make_quantized_experts
from tests.support.tolerances import assert_rows_close

routing = ROUTINGS["softmax"]
# Sizes that no tile and no block divides.
CASES = [
    ("fp8", 136, 40, torch.float32, True),
    ("fp8", 40, 136, torch.float16, False),
    ("mxfp4", 64, 96, torch.float32, True),
    ("mxfp4", 160, 32, torch.float16, False),
]
for kind, hidden_size, inner, dtype, is_clamped in CASES:
    experts = make_quantized_experts(
        kind, hidden=hidden_size, inner=inner, dtype=dtype, is_clamped=is_clamped
    )
    for num_tokens, apply in ((1, apply_pairs_quantized), (5, apply_grouped_quantized)):
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        hidden = torch.randn(num_tokens, hidden_size).to(dtype)
        exact = reference.apply_experts(
            hidden.double(), weights.double(), ids, exactly(experts)
        )
        actual = apply(hidden, weights, ids.int(), experts)
        assert actual.dtype == dtype
        assert_rows_close(actual, exact)
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, QUANTIZED_PROGRAM], ids=["plain", "quantized"])
def test_kernels_agree_with_the_references_in_the_interpreter(program):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=250)
