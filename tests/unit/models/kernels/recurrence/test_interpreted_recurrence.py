"""Kernels of recurrent states in Triton's interpreter, against loops in float64."""

import pytest

from tests.support.programs import run_interpreted

COMMON = """
import torch
torch.set_num_threads(1)
from models.state_cache import StateSpec
from tests.support.recurrence_case import (
    check, delta_spec, make_conv_case, make_delta_case, make_step
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
"""
DELTA_PROGRAM = """
for dtype, is_per_channel in (
    (torch.float32, False), (torch.float16, False), (torch.float32, True), (torch.float16, True)
):
    spec = delta_spec(4, 12, 20)
    for lens in ([1, 1, 1], [2, 0, 1, 5], [65, 0, 17, 5, 64, 130]):
        for unit_bytes, regions in ((80, 2), (400, 1), (4096, 2)):
            step = make_step(
                lens, spec, unit_bytes=unit_bytes, regions=regions, num_dummies=len(lens) - 3
            )
            case = make_delta_case(
                step, 2, dtype=dtype, decays_channels=is_per_channel, num_padding=3
            )
            # Chunks round the state before products, to 16 bits.
            check(case, state_tolerance=2e-5 if dtype == torch.float32 else 2e-3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [CONV_PROGRAM, DELTA_PROGRAM], ids=["conv", "delta"])
def test_recurrence(program):
    run_interpreted(COMMON + program)
