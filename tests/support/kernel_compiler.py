"""Imports what programs that build kernels import, and has Triton hash itself, which it does once.

For a fork server.
"""

import torch._inductor  # noqa: F401  which torch imports for deterministic algorithms
from triton.runtime.cache import triton_key

import tests.support.random_checkpoints  # noqa: F401  whose models programs write

triton_key()
