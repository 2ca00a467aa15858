"""The kernels that communicate, built for a GPU without one, wait for each row exactly once.

A wait clears the words that it returns: a copy of one, as a compiler makes of loads, never ends.
"""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import torch
import triton
from tests.support.absent_hopper import pretend
pretend()
from models.number_formats import FP8
from models.kernels.ranks.exchange import launcher
from models.kernels.launching.kernel_builds import launches_skipped
from tests.support.kernel_launches import absent_gpu

RANKS, SIZE = 4, 1024
row, number = torch.empty(1, SIZE, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int32)
state = (torch.empty(RANKS, dtype=torch.int64), number, number, number)

def launch(kernel, group):
    if group is None:
        launcher(kernel, SIZE, 1, RANKS, 64, row.device)((1, 1, 1), row, row, *state, 1, 2**36)
        return
    outputs = (row.to(FP8), torch.empty(1, 8)) if group else (row, None)
    constants = {"PARTS": 0, "GROUP": group or SIZE}
    fused = launcher(kernel, SIZE, 1, RANKS, 64, row.device, **constants)
    fused((1, 1, 1), row, row, row, *outputs, *state, 1e-6, 1, 4, 2**36)

def num_waits(kernel, group):
    with absent_gpu(), launches_skipped() as builds:
        launch(kernel, group)
    (build,) = builds.values()
    built = triton.compile(build.source, target=build.target, options=dict(build.options))
    # A thread has one vector, so each instruction of the source is one of the GPU.
    return [built.asm[stage].count("ld.relaxed.sys") for stage in ("ttir", "ttgir", "ptx")]

for group in (0, SIZE, 128):
    assert num_waits("all_reduce_norm", group) == [RANKS - 1] * 3, group
    assert num_waits("two_shot_norm", group) == [RANKS] * 3, group
assert num_waits("gather_rows", None) == [RANKS - 1] * 3
assert num_waits("reduce_scatter", None) == [RANKS - 1] * 3
"""


@pytest.mark.slow
def test_each_row_is_awaited_once():
    run_building(PROGRAM)
