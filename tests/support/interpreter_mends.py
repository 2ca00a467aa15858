"""Mends Triton's interpreter where it differs from a GPU, for every program that it runs.

Import under TRITON_INTERPRET=1.
"""

import numpy as np
import torch
from triton.language import float16
from triton.runtime import interpreter

from tests.support.gpu_facts import properties

_create_splat = interpreter.InterpreterBuilder.create_splat
_create_dot = interpreter.InterpreterBuilder.create_dot


def mend() -> None:
    """Keeps booleans in splats; gives each element of a product the same bits in every tile.

    Tiles are the tables', whatever memory they need, without kernels for Hopper alone.
    """
    torch.cuda.get_device_properties = lambda device=None: properties((8, 0), shared_bytes=2**20)
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter.InterpreterBuilder.create_dot = _dot


def _splat(self, ret_ty, arg):
    """A boolean that becomes a block stays a boolean.

    It becomes the type of what was compared, which loads refuse as a mask since Triton 3.9.
    """
    splat = _create_splat(self, ret_ty, arg)
    if arg.data.dtype == bool:
        splat.data = splat.data.astype(bool)
    return splat


def _dot(self, a, b, total, *others):
    """Sums products in double precision.

    In single precision numpy's BLAS adds up some columns in another order, on some processors.
    """
    if not a.dtype.scalar.is_floating():
        return _create_dot(self, a, b, total, *others)
    product = np.matmul(_doubles(a), _doubles(b)).astype(total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


def _doubles(factor):
    data, scalar = factor.data, factor.dtype.scalar
    if scalar.primitive_bitwidth == 8:
        data = interpreter._convert_float(data, scalar, float16, None).view(np.float16)
    return data.astype(np.float64)
