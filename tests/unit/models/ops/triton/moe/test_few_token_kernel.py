"""Machine code of the kernel of MXFP4 experts of few tokens each, built for a GPU without one."""

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

def built(height, size, num_experts, is_clamped):
    experts = make_quantized_experts(
        "mxfp4", num_experts=num_experts, hidden=size, inner=size, is_clamped=is_clamped
    )
    x = torch.zeros(4, size, dtype=torch.bfloat16)
    ids = torch.zeros(4, 1, dtype=torch.int32)
    order = torch.zeros(4, dtype=torch.int32), torch.zeros(num_experts + 1, dtype=torch.int32)
    before = {id(build) for each in _launches for build in each._builds.values()}
    with absent_gpu():
        few_token_products(x, ids, experts, order, height)
    after = [build for each in _launches for build in each._builds.values()]
    return [build for build in after if id(build) not in before]

assert has_room(8, 2944, 2880) and not has_room(8, 2880, 2976) and not has_room(256, 64, 64)
cases = (None, 2, True), (2880, 40, False), (160, 2, False)
for (height, tiles), case in product(FEW_TOKEN_TILES.items(), cases):
    size, *others = case
    builds = built(height, size or tiles.most_inputs, *others)
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
