"""Machine code of the kernel of experts of 4 bits, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import sys
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.launching.launch import _launches
from models.kernels.experts.packed.expert_kernel import expert_kernel
from models.kernels.experts.packed.expert_product import both_products, ungated_product
from models.kernels.experts.packed.matrix_experts import expert_product
from models.kernels.tuning.hopper import EXPERTS, EXPERTS_ALONE
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import check_unpacked_products, machine_code
from tests.support.moe_case import make_quantized_experts

kind, size = sys.argv[1], int(sys.argv[2])
x = torch.zeros(4, size, dtype=torch.bfloat16)
ids = torch.zeros(4, 1, dtype=torch.int32)
order = (torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
experts = make_quantized_experts(kind, num_experts=2, hidden=size, inner=size, is_clamped=True)
both = both_products(x, ids, experts)
tiles_of = [{(tiles, order) for tiles in each} for each in zip(*EXPERTS.values())]
if kind == "mxfp4":
    tiles_of = [each | {(EXPERTS_ALONE, None)} for each in tiles_of]
else:
    # Each way to unpack has all tiles whose registers are scarce, one has the others.
    tiles_of = [
        {(tiles, order) for tiles, order in each if tiles.max_registers or tiles.num_unpacked > 1}
        for each in tiles_of
    ]
# Gate and up of experts with adapters.
both += (
    ungated_product(
        x, ids, experts.gate_up, experts.gate_up_scale, experts.gate_up_bias, num_parts=2
    ),
)
tiles_of.append({(EXPERTS_ALONE, None), (EXPERTS[64][1], order)})
with absent_gpu():
    for product, each in zip(both, tiles_of):
        for tiles, order in each:
            expert_product(product, order, tiles)
builds = [
    build for each in _launches if each._kernel is expert_kernel for build in each._builds.values()
]
assert len(builds) == sum(map(len, tiles_of)) >= 4
for build in builds:
    check_unpacked_products(machine_code(build.asm["cubin"]))
"""


# Of gpt-oss: 45 tiles of 64 inputs and 23 of 128, so that not all steps are in pairs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [*((kind, 2880) for kind in ("mxfp4", "nvfp4", "int4-32", "int4-64")), ("int4-128", 2944)],
)
def test_unpacked_weights_stay_until_tensor_cores_have_read_them(kind, size):
    run_building(PROGRAM, kind, size)
