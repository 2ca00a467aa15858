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


@needs_triton
@pytest.mark.slow
def test_kernels_agree_with_the_references_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=250)
