"""Marks tests of kernels that need Triton's compiler or interpreter, and no GPU."""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which CPU installs leave out"
)
