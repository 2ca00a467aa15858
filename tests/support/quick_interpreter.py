"""Spares Triton's interpreter work that it repeats for each operation; results are the same.

Most of its time goes to looking up the functions that it replaces, for each call of a function that
a kernel calls, and to describing shapes and types. Import under TRITON_INTERPRET=1.
"""

import math
from dataclasses import replace
from functools import cache
from types import FunctionType

import numpy as np
from triton.language import core, int8, standard
from triton.runtime import interpreter

_replace_functions = interpreter._patch_lang
_init_block_type = core.block_type.__init__
_np_dtype_of_scalar = cache(interpreter._get_np_dtype)
# A function beside those of Triton's library, which kernels call.
_OF_LIBRARY = FunctionType((lambda: None).__code__, vars(standard))


def interpret_quickly() -> None:
    """Makes kernels run about three times as fast."""
    interpreter._patch_lang = _replace_all_functions
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _np_dtype
    core.block_type.__init__ = _describe_block
    core.tensor.__init__ = _describe_tensor
    core.tuple_type.__init__ = _describe_tuple
    core.tuple_type.name = property(_name_of_tuple)
    # Without `debug` these checks are computed, but no result is looked at.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _replace_all_functions(kernel):
    """Replaces functions once for a launch, also for functions that the kernel calls."""
    scope = _replace_functions(kernel)
    scope._changes += _replace_functions(_OF_LIBRARY)._changes
    return scope


def _call(self, *args, **kwargs):
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _np_dtype(of_type):
    scalar = of_type.element_ty if isinstance(of_type, core.block_type) else of_type
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_scalar(scalar)


def _describe_block(self, element_ty, shape):
    like = _block_of(tuple(core._unwrap_if_constexpr(size) for size in shape))
    self.element_ty = element_ty
    self.shape, self.numel = like.shape, like.numel
    self.name = f"<{like.shape_name}, {element_ty}>"


@cache
def _block_of(sizes):
    block = object.__new__(core.block_type)
    _init_block_type(block, int8, list(sizes))
    block.shape_name = str(block.shape)
    return block


def _describe_tensor(self, handle, of_type):
    self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
    self.shape, self.numel = _shape_of(tuple(of_type.shape) if of_type.is_block() else ())


@cache
def _shape_of(sizes):
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _describe_tuple(self, types, fields=None):
    self.types, self.fields = types, fields or [""] * len(types)


def _name_of_tuple(self):
    parts = [f"{field}:{each}" for field, each in zip(self.fields, self.types, strict=True)]
    return f"[{','.join(parts)}]"
