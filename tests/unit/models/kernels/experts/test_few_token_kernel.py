"""Machine code of the kernel of experts of few tokens each, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
from functools import lru_cache
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.launching.launch import _launches
from models.kernels.experts.packed.expert_product import both_products
from models.kernels.experts.packed.few_token_experts import few_token_product, few_token_tiles
from models.kernels.tuning.hopper import FEW_TOKEN_EXPERTS
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import early_writes, machine_code, product_loops
from tests.support.moe_case import make_quantized_experts

@lru_cache(maxsize=1)
def products_of(kind, size, num_experts=2, is_clamped=False):
    experts = make_quantized_experts(
        kind, num_experts=num_experts, hidden=size, inner=size, is_clamped=is_clamped
    )
    ids = torch.zeros(4, 1, dtype=torch.int32)
    return both_products(torch.zeros(4, size, dtype=torch.bfloat16), ids, experts)

def built(tiles, kind, size, num_experts, is_clamped):
    order = torch.zeros(4, dtype=torch.int32), torch.zeros(num_experts + 1, dtype=torch.int32)
    before = {id(build) for each in _launches for build in each._builds.values()}
    with absent_gpu():
        for each in products_of(kind, size, num_experts, is_clamped):
            few_token_product(each, order, tiles)
    after = [build for each in _launches for build in each._builds.values()]
    return [build for build in after if id(build) not in before]

EACH = {"mxfp4": 1, "nvfp4": 4, "int4-128": 1, "int4-64": 2, "int4-32": 4}
def most_inputs(kind, tiles):
    return max(size for size in range(128, 3200, 128) if tiles.has_room(size, EACH[kind]))

for kind in EACH:
    gate_up, down = products_of(kind, 384)
    for height, each_tiles in FEW_TOKEN_EXPERTS.items():
        assert few_token_tiles(height, gate_up) == each_tiles[0]
(small,), (middle,), (first, second) = FEW_TOKEN_EXPERTS.values()
gate_up, down = products_of("mxfp4", 2880)
assert few_token_tiles(8, down) == small
assert few_token_tiles(32, down) == second
assert few_token_tiles(64, down) is None
assert few_token_tiles(8, products_of("mxfp4", 2976)[0]) is None
# Kinds of other sizes have other memory for their scales.
assert most_inputs("mxfp4", small) == most_inputs("int4-128", small) > most_inputs("int4-64", small)
assert most_inputs("int4-64", small) > most_inputs("int4-32", small) > 2048
most, few, wide = (None, 2, True), (160, 2, False), (2880, 2, False)
# All tiles with each way to unpack, of floats of two kinds and of integers. Integers in larger
# groups have fewer words of scales, one for a step of 64 or of 128 columns.
cases = (
    ("mxfp4", most, small), ("mxfp4", most, middle), ("mxfp4", few, first), ("mxfp4", wide, second),
    ("nvfp4", few, small), ("nvfp4", most, middle), ("nvfp4", most, first), ("nvfp4", few, second),
    ("int4-32", few, small), ("int4-32", few, middle), ("int4-32", most, first),
    ("int4-32", most, second), ("int4-64", most, first), ("int4-64", (384, 40, False), second),
    ("int4-128", (256, 128, False), middle), ("int4-128", most, second),
)
for kind, (size, *others), tiles in cases:
    builds = built(tiles, kind, size or most_inputs(kind, tiles), *others)
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
def test_groups_unpack_and_multiply_without_waste():
    run_building(PROGRAM)
