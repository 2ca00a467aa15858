"""Machine code of the kernels of recurrent states, at sizes of released models."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
from dataclasses import replace
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.launching.launch import _launches
from models.state_cache import StateSpec
from tests.support.kernel_launches import absent_gpu
from tests.support.machine_code import IS_COMPILER_OF_GPUS, machine_code, spills
from tests.support.recurrence_case import (
    make_conv_case, make_delta_case, make_linear_case, make_space_case, make_step, state_spec
)

# The inverse of a chunk takes all registers, and sizes of steps all of a loop.
MOST_SPILLS = {
    "_prepare_delta_chunks_kernel": 64, "_decayed_chunks_kernel": 64,
}

def make(function, spec, lens, *arguments, wide=(), **options):
    step = make_step(lens, spec, unit_bytes=2**14)
    case = function(step, *arguments, dtype=torch.bfloat16, **options)
    # As projections are: aligned.
    return replace(case, **{name: getattr(case, name).contiguous() for name in wide})

conv = StateSpec(conv_channels=8192, conv_width=4, conv_dtype=torch.bfloat16)
full = state_spec(32, 128, 128)
with absent_gpu():
    for lens in ([1, 1], [1, 200]):
        make(make_conv_case, conv, lens, wide=("x",)).run()
        make(make_delta_case, full, lens, 16, wide=("qkv", "a", "b")).run()
        make(make_delta_case, full, lens, 32, decays_channels=True, wide=("qkv", "a", "b")).run()
        make(make_space_case, state_spec(64, 64, 128), lens, 8, wide=("xbc", "dt")).run()
        make(make_linear_case, full, lens).run()
num_builds = 0
for launch in _launches:
    for build in launch._builds.values():
        name, found = launch._kernel.fn.__name__, spills(machine_code(build.asm["cubin"]))
        assert not IS_COMPILER_OF_GPUS or found <= MOST_SPILLS.get(name, 0), (name, found)
        num_builds += 1
assert num_builds >= 13, num_builds
"""


@pytest.mark.slow
def test_states_stay_in_registers():
    run_building(PROGRAM)
