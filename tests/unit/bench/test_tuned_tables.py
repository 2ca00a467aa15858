"""Candidates of the tuner reach the kernels that it times, built for a card that is not there."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import sys
card, names = sys.argv[1], sys.argv[2:]
from tests.support.absent_hopper import pretend
pretend(card)
import torch
from torch.overrides import TorchFunctionMode
from models.kernels.gpu import gpu_of
from models.kernels.launching.kernel_builds import load_kernel_functions
from models.kernels.tuning.table import look_up
from services.engine.worker.start.kernel_building import found_in
from tests.bench import experts, kernels, recurrence, tune
from tests.support.kernel_launches import absent_gpu

load_kernel_functions()
CPU = torch.device("cpu")
SIZES = {
    "vectors": (1, 64, 1024, False), "MATRICES": (8, 320, 1024, False),
    "GATED_MATRICES": (8, 320, 1024, True), "single_tokens": (12, 32), "first_chunk": (1, 40, 0),
    "later_chunk": (1, 20, 40), "delta_steps": 1, "prefixes": (4, 32),
}
kernels.copies = recurrence.copies = lambda *_: 1
experts.MODELS = {
    name: (kind, shape | {"num_experts": 8, "hidden": 256, "inner": 256}, routing)
    for name, (kind, shape, routing) in experts.MODELS.items()
}

def here(value):
    is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return CPU if is_device else value

class Here(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        options = {name: here(value) for name, value in (options or {}).items()}
        return function(*map(here, arguments), **options)

generator = torch.Generator
torch.Generator = lambda device: generator(CPU)
gpu = gpu_of(CPU)
with Here(), absent_gpu(card):
    for name in names:
        tuned, table = tune.TUNED[name], tune.current(name, gpu)
        key = list(tuned.points)[-1 if isinstance(table, tuple) else 0]
        old = look_up(table, *key) if isinstance(table, tuple) else table[key]
        calls = tuned.calls(key, SIZES.get(name, 64))
        candidates = [old, *tuned.candidates(key, old)]
        seen = set()
        chosen = {old, candidates[1], candidates[-1]}
        for tiles in chosen:
            trial = (((float("inf"),) * len(key), tiles),) if isinstance(table, tuple) else (
                dict.fromkeys(table, tiles)
            )
            with tune.trying(name, trial, gpu):
                builds = found_in(calls[:1]).values()
            seen.add(frozenset(f"{build.constants} {build.options}" for build in builds))
        assert len(seen) == len(chosen), name
"""


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("L40S", "vectors single_tokens first_chunk later_chunk fp8_experts mxfp4_experts"),
        ("H200", "MATRICES GATED_MATRICES prefixes grouped_experts delta_steps"),
    ],
)
def test_candidates_reach_the_kernels_that_are_timed(card, names):
    pytest.importorskip("triton")
    run_building(PROGRAM, card, *names.split())
