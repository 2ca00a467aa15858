"""tests/gpu runs with the versions that an image for a GPU gets."""

from pathlib import Path

import pytest
import torch
import triton

pytestmark = pytest.mark.gpu

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints-gpu.txt"


def test_torch_and_triton_are_the_pinned_ones():
    lines = CONSTRAINTS.read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    found = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    assert found == pinned
