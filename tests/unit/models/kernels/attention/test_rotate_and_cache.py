"""Accesses to memory of the kernel that rotates heads, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import re
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.attention.cache.rotate_and_cache import FEW_TOKENS, rotate_and_cache
from models.kernels.launching.launch import _launches
from tests.support.attention_case import Heads, make_case
from tests.support.kernel_launches import absent_gpu

num_tokens = FEW_TOKENS + 1
heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
with absent_gpu():
    case = make_case([num_tokens], [num_tokens], heads, dtype=torch.bfloat16, has_fp8_cache=True)
    assert not case.q.is_contiguous()
    q, k, v = (torch.empty(x.shape, dtype=x.dtype) for x in (case.q, case.k, case.v))
    rotate_and_cache(
        case.q, case.k, case.v, q, k, case.cache, case.metadata.slot_mapping, case.transform,
        kept_v=v,
    )
launches = [each for each in _launches if each._kernel.__name__ == "_rotate_and_cache_kernel"]
(build,) = (build for each in launches for build in each._builds.values())
accesses = re.findall(r"(ld|st)\\.global((?:\\.v\\d)?\\.b\\d+)", build.asm["ptx"])
# Heads, rotations, weights and rows in 16 bits: 8 elements of a thread at once.
assert [each for each in accesses if each[1] == ".v4.b32"], accesses
# Eight bytes are slots and halves of a head in 8 bits, four bytes its scale.
assert {size for _, size in accesses} <= {".v4.b32", ".v2.b32", ".b64", ".b32"}, accesses
"""


@pytest.mark.slow
def test_all_elements_of_a_thread_are_read_and_written_at_once():
    run_building(PROGRAM)
