"""Machine code of attention to shared prefixes."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.attention.attention import attend
from models.kernels.attention.decode.prefix_attention import NewTokens, prefix_attention
from models.kernels.launching.launch import _launches
from tests.support.attention_case import Heads, make_case
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import IS_COMPILER_OF_GPUS, machine_code, spills
from tests.support.prefix_case import with_shared

heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
with absent_gpu():
    for has_fp8_cache in (False, True):
        case = make_case(
            [1] * 4, [90] * 4, heads, dtype=torch.bfloat16, has_fp8_cache=has_fp8_cache
        )
        case = with_shared(case, [([0, 1, 2, 3], 4)])
        slots = case.metadata.slot_mapping
        new = NewTokens(k=case.k, v=case.v, transform=case.transform, slot_mapping=slots)
        prefix_attention(case.q, case.cache, case.metadata, new, scale=0.1, soft_cap=0.0)
        case = make_case(
            [4] * 4, [90] * 4, heads, dtype=torch.bfloat16, has_fp8_cache=has_fp8_cache
        )
        case = with_shared(case, [([0, 1, 2, 3], 4)])
        attend(
            case.q, case.k, case.v, torch.empty_like(case.q).contiguous(), case.cache,
            case.metadata, case.transform, None, None, 0.1, 0.0,
        )
builds = [build for launch in _launches for build in launch._builds.values()]
transforming = [
    build for build in builds
    if build.metadata.name == "prefix_kernel" and "has_new=True" in str(build.src.constants)
]
assert len(transforming) == 2
for code in (machine_code(build.asm["cubin"]) for build in transforming):
    # A row's elements are in one warp, so its norm is no exchange between warps.
    num_barriers = sum("BAR.SYNC" in line for line in code)
    assert num_barriers <= 24, num_barriers
    assert not IS_COMPILER_OF_GPUS or not spills(code), spills(code)
drafts = [build for build in builds if build.metadata.name == "draft_kernel"]
assert len(drafts) == 2
for code in (machine_code(build.asm["cubin"]) for build in drafts):
    assert not IS_COMPILER_OF_GPUS or not spills(code), spills(code)
"""


@pytest.mark.slow
def test_queries_of_a_tile_are_transformed_within_warps():
    run_building(PROGRAM)
