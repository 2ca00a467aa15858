"""The kernel of FP8 experts, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.launching.launch import _launches
from models.kernels.experts.expert_forms import OF_8_BITS
from models.kernels.experts.fp8.fp8_experts import apply_fp8_on_cores
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import (
    IS_COMPILER_OF_GPUS, machine_code, product_loops, spills,
)
from tests.support.moe_case import make_quantized_experts

NUM_EXPERTS = 16

heights, num_tall = set(), 0
for kind, num_tokens, dtype, size in (
    *(("fp8", count, torch.bfloat16, 512) for count in (1, 100, 256, 700, 4000)),
    *(("fp8-rows", count, torch.bfloat16, 512) for count in (64, 700, 4000)),
    # Outputs that have no halves.
    ("fp8", 700, torch.float32, 400), ("fp8", 4000, torch.float32, 400),
    ("fp8", 4000, torch.bfloat16, 400), ("fp8-rows", 4000, torch.bfloat16, 400),
):
    experts = make_quantized_experts(kind, num_experts=NUM_EXPERTS, hidden=size, inner=384)
    hidden = torch.zeros(num_tokens, size, dtype=dtype)
    ids = torch.zeros(num_tokens, 1, dtype=torch.int32)
    with absent_gpu():
        weights, output = torch.zeros(num_tokens, 1), torch.empty_like(hidden)
        apply_fp8_on_cores(hidden, weights, ids, experts, output)
for launch in _launches:
    if "GROUP_REGISTERS" not in launch._constants:
        continue
    heights.add(launch._constants["TOKENS"])
    for build in launch._builds.values():
        assert build.metadata.shared <= 232448, build.metadata.shared
        code = machine_code(build.asm["cubin"])
        assert not IS_COMPILER_OF_GPUS or spills(code) <= 64, spills(code)
        if launch._constants["BY_ROW"]:
            num_tall += launch._constants["TOKEN_AXIS"] == 0
            assert not sum(spills(code[start:end]) for start, end in product_loops(code, "QGMMA"))
assert num_tall == 4, num_tall
assert heights == {height for height, _ in OF_8_BITS.heights}, heights
"""


@pytest.mark.slow
def test_every_height_fits_shared_memory_and_registers():
    run_building(PROGRAM)
