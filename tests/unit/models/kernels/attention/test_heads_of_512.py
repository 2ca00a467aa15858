"""Kernels for heads of 512 fit a multiprocessor: built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])

import torch
import triton
from tests.support.absent_hopper import launched_by, pretend
pretend()
from models.batch_invariance import use_batch_invariance
from models.kv_cache import FP8_CACHE_DTYPE
from models.kernels.launching.kernel_builds import load_kernel_functions
from tests.support.kernel_launches import absent_gpu
from tests.support.random_checkpoints import write_checkpoint

load_kernel_functions()
write_checkpoint(folder, "gemma4", head_dim=256, global_head_dim=512, hidden_size=64)
with absent_gpu():
    builds = launched_by(folder) | launched_by(folder, dtype=torch.float32)
    builds |= launched_by(folder, cache_dtype=FP8_CACHE_DTYPE)
    use_batch_invariance(is_on=True)
    builds |= launched_by(folder)
num_checked = 0
for build in builds.values():
    values = list(dict(build.constants).values())
    if ".attention." not in build.module or not any(value == 512 for value in values):
        continue
    compiled = triton.compile(build.source, target=build.target, options=dict(build.options))
    assert compiled.metadata.shared <= 232448, (build.name, values, compiled.metadata.shared)
    num_checked += 1
print(num_checked)
assert num_checked >= 6, num_checked
"""


@pytest.mark.slow
def test_every_kernel_fits_shared_memory(tmp_path):
    run_building(PROGRAM, tmp_path / "checkpoint")
