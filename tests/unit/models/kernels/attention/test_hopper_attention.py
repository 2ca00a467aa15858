"""Machine code of the kernel of chunks on Hopper GPUs, built without one."""

import pytest

from models.kernels.attention.prefill.hopper_copies import is_packed, rows_of_token
from tests.support.programs import run_building

PROGRAM = """
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.batch_invariance import use_batch_invariance
from models.kernels.launching.launch import _launches
from tests.support.attention_case import Heads, make_case
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import machine_code, product_loops

# With few tokens, programs share tiles of queries, except in batch-invariant mode.
FEW, MANY = 100, 300
for num_heads, num_kv_heads, head_dim, length, is_invariant in (
    # Groups without padding, packed, and padded.
    (32, 8, 128, FEW, False), (32, 8, 128, MANY, False), (32, 8, 128, MANY, True),
    (40, 8, 128, FEW, False), (40, 8, 128, FEW, True),
    (28, 4, 128, MANY, False),
    (16, 2, 256, FEW, False), (16, 2, 256, MANY, False),
):
    heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    use_batch_invariance(is_on=is_invariant)
    with absent_gpu():
        case = make_case([length, 1, 0], [length, 1, 0], heads, dtype=torch.bfloat16)
        case.run_into(torch.empty(case.q.shape, dtype=case.q.dtype))
launches = [each for each in _launches if each._kernel.__name__ == "_hopper_attention_kernel"]
builds = {id(build): build for each in launches for build in each._builds.values()}
assert len(builds) == 8
for build in builds.values():
    assert build.metadata.launch_pdl
    code = machine_code(build.asm["cubin"])
    # The next kernel may start; each of the three parts waits for the kernels before.
    assert sum("PREEXIT" in line for line in code) == 1
    assert sum("ACQBULK" in line for line in code) == 3
    # No register of a loop with products is kept in memory.
    for start, end in product_loops(code):
        assert not any(line.startswith(("STL", "LDL")) for line in code[start:end])
"""


@pytest.mark.slow
def test_each_part_waits_for_earlier_kernels_and_keeps_its_registers():
    run_building(PROGRAM)


@pytest.mark.parametrize(
    ("group", "rows"),
    [(1, 1), (3, 3), (5, 5), (6, 6), (7, 8), (8, 8), (12, 12), (13, 16), (25, 25), (64, 64)],
)
def test_groups_that_padding_would_make_much_larger_are_packed(group, rows):
    assert rows_of_token(group) == rows
    assert is_packed(group) == (rows == group and group.bit_count() > 1)
