"""Kernels of recurrent states in Triton's interpreter, against loops in float64."""

import pytest

from tests.support.programs import run_interpreted

COMMON = """
import torch
torch.set_num_threads(1)
from models.state_cache import StateSpec
from tests.support.recurrence_case import (
    check, make_conv_case, make_delta_case, make_linear_case, make_space_case, make_step, state_spec
)
"""
CONV_PROGRAM = """
for width, dtype, options in (
    (4, torch.float32, {}), (2, torch.float16, {"has_bias": False}),
    (7, torch.float32, {"activates": False}), (3, torch.float16, {}),
):
    spec = StateSpec(
        num_heads=2, head_rows=3, head_columns=5, conv_channels=13, conv_width=width,
        conv_dtype=dtype,
    )
    for lens in ([1, 1, 1], [2, 0, 1, 5], [1, 33, 0, 7, 64, 65]):
        for unit_bytes, regions in ((20, 2), (48, 1), (1024, 2)):
            step = make_step(
                lens, spec, unit_bytes=unit_bytes, regions=regions, num_dummies=len(lens) - 3
            )
            check(make_conv_case(step, dtype=dtype, num_padding=3, **options))
    for lens in ([1, 4, 2, 3, 0], [1, 33, 4, 5, 2]):
        step = make_step(lens, spec, unit_bytes=48, num_slots=4, num_dummies=1)
        check(make_conv_case(step, dtype=dtype, num_padding=3, **options))
"""
CACHES = """
FEW = [1, 1, 1], [2, 0, 1, 5]
LONG = [65, 0, 17, 5, 64, 130, 1]
CACHES = (FEW[0], 80, 2), (FEW[1], 400, 1), (FEW[1], 4096, 2), (LONG, 400, 2)

def steps(spec):
    for lens, unit_bytes, regions in CACHES:
        num_dummies = len(lens) - 3
        yield make_step(
            lens, spec, unit_bytes=unit_bytes, regions=regions, num_dummies=num_dummies
        )
    for lens in ([1, 4, 2, 3, 0], [66, 4, 5, 1, 70]):
        yield make_step(lens, spec, unit_bytes=400, num_slots=4, num_dummies=1)

# Chunks round the state before products, to 16 bits.
STATE_TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3}
"""
DELTA_PROGRAM = """
for dtype, tolerance in STATE_TOLERANCES.items():
    for decays_channels, options in ((False, {}), (True, {"beta_scale": 2.0, "decay_floor": -5.0})):
        for step in steps(state_spec(4, 12, 20)):
            case = make_delta_case(
                step, 2, dtype=dtype, decays_channels=decays_channels, num_padding=3, **options
            )
            check(case, state_tolerance=tolerance)
"""
SPACE_PROGRAM = """
for dtype, tolerance in STATE_TOLERANCES.items():
    for step in steps(state_spec(4, 12, 20)):
        check(make_space_case(step, 2, dtype=dtype, num_padding=3), state_tolerance=tolerance)
"""
LINEAR_PROGRAM = """
for dtype, tolerance in STATE_TOLERANCES.items():
    for step in steps(state_spec(4, 20, 20)):
        check(make_linear_case(step, dtype=dtype, num_padding=3), state_tolerance=tolerance)
"""
PROGRAMS = {
    "conv": CONV_PROGRAM,
    "delta": CACHES + DELTA_PROGRAM,
    "space": CACHES + SPACE_PROGRAM,
    "linear": CACHES + LINEAR_PROGRAM,
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_recurrence(program):
    run_interpreted(COMMON + program)
