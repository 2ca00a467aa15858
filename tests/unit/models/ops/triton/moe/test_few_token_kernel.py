"""Machine code of the kernel of experts of few tokens each, built for a GPU without one."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from itertools import product
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.ops.triton.launching.launch import _launches
from models.ops.triton.moe.few_token_experts import (
    FEW_TOKEN_TILES, few_token_products, has_room,
)
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import early_writes, machine_code, product_loops
from tests.support.moe_case import make_quantized_experts

def experts_of(kind, hidden, inner, num_experts=2, is_clamped=False):
    return make_quantized_experts(
        kind, num_experts=num_experts, hidden=hidden, inner=inner, is_clamped=is_clamped
    )

def built(height, kind, size, num_experts, is_clamped):
    experts = experts_of(kind, size, size, num_experts, is_clamped)
    x = torch.zeros(4, size, dtype=torch.bfloat16)
    ids = torch.zeros(4, 1, dtype=torch.int32)
    order = torch.zeros(4, dtype=torch.int32), torch.zeros(num_experts + 1, dtype=torch.int32)
    before = {id(build) for each in _launches for build in each._builds.values()}
    with absent_gpu():
        few_token_products(x, ids, experts, order, height)
    after = [build for each in _launches for build in each._builds.values()]
    return [build for build in after if id(build) not in before]

def most_inputs(kind, height):
    sizes = range(128, 3200, 128)
    return max(size for size in sizes if has_room(height, experts_of(kind, size, 128)))

assert has_room(8, experts_of("mxfp4", 2944, 2880))
assert not has_room(8, experts_of("mxfp4", 2880, 2976))
assert not has_room(256, experts_of("mxfp4", 64, 64))
# Kinds of other sizes have other memory for their scales.
assert most_inputs("mxfp4", 8) == most_inputs("int4-128", 8) > most_inputs("int4-64", 8)
assert most_inputs("int4-64", 8) > most_inputs("int4-32", 8) > 2048
cases = (None, 2, True), (2880, 40, False), (160, 2, False)
kinds = {
    "mxfp4": cases, "int4-32": ((None, 2, True), (160, 2, False)), "int4-64": ((None, 40, False),),
    "int4-128": ((None, 2, True), (2048, 128, False)),
}
each_case = [(kind, *case) for kind, of_kind in kinds.items() for case in of_kind]
for (height, tiles), (kind, size, *others) in product(FEW_TOKEN_TILES.items(), each_case):
    builds = built(height, kind, size or most_inputs(kind, height), *others)
    assert len(builds) == 2
    for build in builds:
        # Programs fit the 228 KiB of a multiprocessor, of which each takes one more.
        assert tiles.programs * (build.metadata.shared + 1024) <= 228 * 1024
        code = machine_code(build.asm["cubin"])
        early = early_writes(code)
        assert not early, early
        for start, end in product_loops(code):
            lines = code[start:end]
            # No register is kept in memory.
            assert not any(line.startswith(("STL", "LDL")) for line in lines)
            # Products of a step are begun together.
            assert sum("HGMMA" in line for line in lines) == tiles.columns / 16
            assert sum("HGMMA" in line and "gsb0" in line for line in lines) == 1
            # The compiler knows that slots are the same in all lanes.
            assert not any("R2UR" in line for line in lines)
            # A slot is freed when all warps of the group have read it.
            freed = next(at for at, line in enumerate(lines) if "SYNCS.ARRIVE" in line)
            last_read = max(at for at, line in enumerate(lines) if line.startswith("LDS"))
            assert any("BAR.SYNC" in line for line in lines[last_read:freed])
"""


@pytest.mark.slow
def test_groups_unpack_and_multiply_without_waste(tmp_path):
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=850)
