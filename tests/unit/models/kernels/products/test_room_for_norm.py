"""Products of few tokens leave room for the next norm; builds for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
from itertools import product
import torch
from tests.support.absent_hopper import CPU, pretend
pretend()
from models.number_formats import BLOCK, FP8
from models.operands.token_scales import empty_token_scales
from models.kernels.elementwise.rms_norm import add_rms_norm, add_rounded_rms_norm
from models.kernels.launching.launch import _launches
from models.kernels.products.fp8.fp8_configurations import fp8_tiles
from models.kernels.tuning.tiles import NarrowFP8Tiles
from models.kernels.products.fp8.rounded_linear import rounded_linear
from models.kernels.products.wide_configurations import wide_tiles
from models.kernels.products.wide_linear import wide_linear
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import machine_code, registers

REGISTERS, SHARED_BYTES, OUTPUTS = 64 * 1024, 228 * 1024, 4096

def taken(launched):
    # Returns the registers and the bytes of shared memory of a program.
    before = {id(build) for each in _launches for build in each._builds.values()}
    with absent_gpu():
        launched()
    after = [build for each in _launches for build in each._builds.values()]
    (build,) = (build for build in after if id(build) not in before)
    code = machine_code(build.asm["cubin"])
    assert not any("STL" in line or "LDL" in line for line in code)
    # A warp has whole multiples of 8 registers for each thread; a program cannot use a KiB.
    of_thread = -(-registers(build.asm["cubin"]) // 8) * 8
    return of_thread * build.metadata.num_warps * 32, build.metadata.shared + 1024

def check(programs, of_product, of_norm):
    sums = [programs * ours + next_one for ours, next_one in zip(of_product, of_norm, strict=True)]
    assert sums[0] <= REGISTERS and sums[1] <= SHARED_BYTES, (programs, of_product, of_norm)

def norm(kernel, parts, **options):
    addends = torch.zeros(parts, 8, OUTPUTS)
    residual, weight = torch.zeros(8, OUTPUTS).bfloat16(), torch.zeros(OUTPUTS).bfloat16()
    return lambda: kernel(addends, residual, weight, 1e-6, **options)

def multiplied(num_tokens, num_inputs, tiles, *, is_blocked):
    rounded = torch.zeros(num_tokens, num_inputs).to(FP8)
    weight = torch.zeros(OUTPUTS, num_inputs).to(FP8)
    num_groups = num_inputs // BLOCK if is_blocked else 1
    scale = empty_token_scales(num_tokens, num_groups, CPU)
    shape = (OUTPUTS // BLOCK, num_groups) if is_blocked else (OUTPUTS, 1)
    operands = rounded, scale, weight, torch.zeros(shape)
    return lambda: rounded_linear(*operands, None, tiles, torch.bfloat16)

norms = {
    (parts, is_blocked): taken(norm(add_rounded_rms_norm, parts, is_blocked=is_blocked))
    for parts, is_blocked in product((2, 4), (False, True))
}
cases = product((16, 32, 64, 128), (4096, 12288), (False, True))
for num_tokens, num_inputs, is_blocked in cases:
    tiles = fp8_tiles(num_tokens, OUTPUTS, num_inputs, may_split=True, device=CPU)
    programs = tiles.programs if isinstance(tiles, NarrowFP8Tiles) else 1
    of_product = taken(multiplied(num_tokens, num_inputs, tiles, is_blocked=is_blocked))
    check(programs, of_product, norms[tiles.splits, is_blocked])

x, weight = torch.zeros(128, 12288).bfloat16(), torch.zeros(OUTPUTS, 12288).bfloat16()
wide = wide_tiles(128, OUTPUTS, 12288, is_gated=False, dtype=x.dtype, device=CPU)
of_product = taken(lambda: wide_linear(x, weight, wide))
check(1, of_product, taken(norm(add_rms_norm, wide.splits, rounds=False)))
"""


@pytest.mark.slow
def test_next_norm_starts_beside_a_product():
    run_building(PROGRAM)
