"""Machine code of the kernel of single pairs of a token and an expert of 4 bits."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.launching.launch import _launches
from models.kernels.experts.packed.expert_product import both_products
from models.kernels.experts.packed.pair_experts import pair_product
from models.kernels.experts.packed.pair_kernel import pair_kernel
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import machine_code
from tests.support.moe_case import make_quantized_experts

ids = torch.zeros(1, 2, dtype=torch.int32)
with absent_gpu():
    # Programs have more rows of few inputs.
    sizes = {"mxfp4": 2880, "nvfp4": 2880, "int4-32": 2880, "int4-64": 2880, "int4-128": 768}
    for kind, size in sizes.items():
        experts = make_quantized_experts(
            kind, num_experts=2, hidden=size, inner=size, is_clamped=True
        )
        for product in both_products(torch.zeros(1, size, dtype=torch.bfloat16), ids, experts):
            pair_product(product)
builds = [
    build for each in _launches if each._kernel is pair_kernel for build in each._builds.values()
]
assert len(builds) == 10
for build in builds:
    code = machine_code(build.asm["cubin"])
    # No register is kept in memory.
    assert not any(line.startswith(("STL", "LDL")) for line in code)
    # Three steps of two rows: all weights of a lane are under way before its first product.
    first_product = next(at for at, line in enumerate(code) if "HMMA" in line)
    assert sum("LDG.E.128" in line for line in code[:first_product]) >= 6
"""


@pytest.mark.slow
def test_all_weights_of_a_pair_are_under_way_before_its_first_product():
    run_building(PROGRAM)
