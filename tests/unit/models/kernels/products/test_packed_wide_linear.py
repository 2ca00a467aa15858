"""Machine code of products with weights of 4 and 8 bits, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import torch
from tests.support.absent_hopper import pretend
pretend()
from tests.support.packed_quantization import quantize_packed
from models.kernels.launching.launch import _launches
from models.kernels.tuning.hopper import PACKED_GATED, PACKED_GATED_FEW
from models.kernels.products.packed.packed_wide_linear import (
    _packed_wide_kernel,
    packed_wide_linear,
)
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import check_unpacked_products, machine_code

FORMATS = ((128, {}), (32, {"has_zeros": True}), (32, {"is_float": True}), (16, {"is_float": True}))
x = torch.zeros(300, 1056).bfloat16()
tiles_of = {bits: [*costs, PACKED_GATED_FEW[bits]] for bits, costs in PACKED_GATED.items()}
# All tiles with one format, all formats with one's tiles.
ways = [(4, 32, {}, tiles) for tiles in tiles_of[4]]
ways += [(4, *each, tiles_of[4][1]) for each in FORMATS]
ways += [(8, 32, {}, tiles) for tiles in tiles_of[8]]
ways += [(8, *each, tiles_of[8][1]) for each in FORMATS[:2]]
with absent_gpu():
    for bits, group, options, tiles in ways:
        columns = 1056 if group == 32 else 1024
        parts = quantize_packed(torch.zeros(272, columns), group, num_bits=bits, **options)
        weight, scale, zero = parts
        packed_wide_linear(
            x[:, :columns].contiguous(), weight, None, tiles, weight_scale=scale,
            weight_zero=zero, is_gated=True,
        )
builds = [
    build
    for each in _launches
    if each._kernel is _packed_wide_kernel
    for build in each._builds.values()
]
assert len(builds) == len(ways), len(builds)
for build in builds:
    check_unpacked_products(machine_code(build.asm["cubin"]))
"""


@pytest.mark.slow
def test_unpacked_weights_stay_until_tensor_cores_have_read_them():
    run_building(PROGRAM)
