"""Mends splats of comparisons in Triton's interpreter.

Import under TRITON_INTERPRET=1.
"""

from triton.runtime import interpreter

_create_splat = interpreter.InterpreterBuilder.create_splat


def keep_booleans() -> None:
    """Keeps a boolean that becomes a block a boolean.

    It becomes the type of what was compared, which loads refuse as a mask since Triton 3.9.
    """
    interpreter.InterpreterBuilder.create_splat = _splat


def _splat(self, ret_ty, arg):
    splat = _create_splat(self, ret_ty, arg)
    if arg.data.dtype == bool:
        splat.data = splat.data.astype(bool)
    return splat
