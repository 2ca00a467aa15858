"""Gluon's functions that have another name in some releases of Triton from 3.6 to 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Waits for all threads of a program; `barrier` since 3.7."""

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Has the copy engine load a box of a tensor into shared memory; `async_load` since 3.8."""

load_elements = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
"""Has threads load elements into shared memory without a wait; `async_load` since 3.8."""

_Shared = gl.shared_memory_descriptor
reinterpret = _Shared.reinterpret if hasattr(_Shared, "reinterpret") else _Shared._reinterpret
"""Returns shared memory with another type, shape and layout; public since 3.9."""
