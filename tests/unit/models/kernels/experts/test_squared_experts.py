"""FP8 experts without gates, built for a card with little shared memory."""

from tests.support.programs import run_building

PROGRAM = """
from tests.support.absent_hopper import pretend
pretend("L40S")
from dataclasses import replace
import torch
from models.kernels.experts.fp8.moe_fp8 import apply_fp8
from models.kernels.launching.kernel_builds import load_kernel_functions
from services.engine.worker.start.kernel_building import found_in
from tests.support.allocated_memory import allocated_memory
from tests.support.gpu_facts import CARDS
from tests.support.kernel_launches import absent_gpu
from tests.support.moe_case import make_quantized_experts

load_kernel_functions()
gated = make_quantized_experts("fp8", num_experts=4, hidden=512, inner=512, dtype=torch.bfloat16)
up, scale = gated.gate_up[:, :512].contiguous(), gated.gate_up_scale[:, :4].contiguous()
experts = replace(gated, gate_up=up, gate_up_scale=scale, is_squared=True)
hidden, weights = torch.randn(40, 512).bfloat16(), torch.rand(40, 2)
ids = torch.randint(0, 4, (40, 2), dtype=torch.int32)
with absent_gpu("L40S"):
    builds = found_in([lambda: apply_fp8(hidden, weights, ids, experts, torch.empty_like(hidden))])
products = [build for build in builds.values() if build.name == "_down_kernel"]
assert products
for build in products:
    assert allocated_memory(build)[0] <= CARDS["L40S"].shared_bytes
"""


def test_their_stages_fit_a_small_card():
    run_building(PROGRAM)
