"""Spares Triton's interpreter work that it repeats for each operation; results are the same.

Most of its time goes to looking up the functions that it replaces, for each call of a function that
a kernel calls, and to describing and comparing shapes and types. Import under TRITON_INTERPRET=1.
"""

import math
from dataclasses import replace
from functools import cache
from types import FunctionType

import numpy as np
from triton.language import core, int8, standard
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replace_functions = interpreter._patch_lang
_init_block_type = core.block_type.__init__
_np_dtype_of_scalar = cache(interpreter._get_np_dtype)
_check_slowly = TritonSemantic.binary_op_type_checking_impl
_broadcast_slowly = TritonSemantic.broadcast_impl_value
_unwrap_others = core._unwrap_if_constexpr
_is_type = core.dtype.__eq__
# A function beside those of Triton's library, which kernels call.
_OF_LIBRARY = FunctionType((lambda: None).__code__, vars(standard))
# Two operands of such a type, or one and a number that is not of a higher kind, have this type.
_INTEGERS = {"int32", "int64"}
_FLOATS = {"fp32", "fp64"}
_NUMBERS = _INTEGERS | _FLOATS
_PLAIN = _NUMBERS | {"int1", "uint32", "uint64"}
_NO_SHAPE = core.tuple([]), core.constexpr(1)
_replaced, _constants, _blocks = {}, {}, {}


def interpret_quickly() -> None:
    """Makes kernels run about five times as fast."""
    interpreter._patch_lang = _replace_all_functions
    interpreter._patch_attr = _replace_function
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _np_dtype
    core._unwrap_if_constexpr = _unwrap
    core.dtype.__eq__ = _is_same_type
    core.block_type.__init__ = _describe_block
    core.block_type.name = property(_name_of_block, lambda self, name: None)
    core.tensor.__init__ = _describe_tensor
    core.tuple_type.__init__ = _describe_tuple
    core.tuple_type.name = property(_name_of_tuple)
    TritonSemantic.binary_op_type_checking_impl = _operands
    TritonSemantic.broadcast_impl_value = _broadcast
    # Without `debug` these checks are computed, but no result is looked at.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _replace_all_functions(kernel):
    """Replaces functions once for a launch, also for functions that the kernel calls."""
    modules = tuple(each in kernel.__globals__.values() for each in (interpreter.tl, core))
    scope = interpreter._LangPatchScope()
    if modules not in _replaced:
        found = [_replace_functions(kernel), _replace_functions(_OF_LIBRARY)]
        changes = [change[:2] for each in found for change in each._changes]
        _replaced[modules] = {(owner, name): getattr(owner, name) for owner, name in changes}
        for each in reversed(found):
            each.restore()
    for (owner, name), function in _replaced[modules].items():
        scope.set_attr(owner, name, function)
    return scope


def _replace_function(owner, name, member, builder, scope):
    """Replaces a function by one that knows the semantic; Triton's wrapper only asks for it."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def replaced(*args, _semantic=None, **kwargs):
        return function(*args, _semantic=semantic, **kwargs)

    scope.set_attr(owner, name, replaced)


def _call(self, *args, **kwargs):
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _np_dtype(of_type):
    scalar = of_type.element_ty if isinstance(of_type, core.block_type) else of_type
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_scalar(scalar)


def _operands(
    self,
    lhs,
    rhs,
    allow_lhs_ptr=False,
    allow_rhs_ptr=False,
    arithmetic_check=True,
    div_or_mod=False,
):
    """Returns both operands with one type and shape."""
    left, right = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
    if arithmetic_check and _keeps(rhs, left):
        return _broadcast(self, lhs, _constant(self, rhs, left))
    if arithmetic_check and _keeps(lhs, right):
        return _broadcast(self, _constant(self, lhs, right), rhs)
    if left is not None and right is not None:
        is_offset = allow_lhs_ptr and type(left) is core.pointer_type and right.name in _INTEGERS
        if is_offset or (left is right and left.name in _PLAIN):
            return _broadcast(self, lhs, rhs)
    return _check_slowly(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _keeps(number, of_type):
    """Whether the result of a number and a tensor of a type has this type."""
    if type(number) is int:
        return of_type is not None and of_type.name in _NUMBERS and -(2**31) <= number < 2**31
    return type(number) is float and of_type is not None and of_type.name in _FLOATS


def _constant(self, number, of_type):
    key = number, of_type.name
    if key not in _constants:
        _constants[key] = self.scalar_constant(number, of_type)
    return _constants[key]


def _broadcast(self, lhs, rhs):
    """Returns both operands with one shape."""
    left, right = lhs.type, rhs.type
    if type(left) is core.block_type:
        if type(right) is not core.block_type:
            return lhs, _splat(self, rhs, left)
        if left.shape is right.shape:
            return lhs, rhs
        shape = _common_shape(id(left.shape), id(right.shape))
        if shape is None:
            return _broadcast_slowly(self, lhs, rhs)
        return _expanded(self, lhs, shape), _expanded(self, rhs, shape)
    if type(right) is core.block_type:
        return _splat(self, lhs, right), rhs
    return lhs, rhs


def _splat(self, scalar, like):
    block = core.block_type(scalar.type.scalar, like.shape)
    return self.tensor(self.builder.create_splat(block, scalar.handle), block)


@cache
def _common_shape(left, right):
    """Returns the shape of both of two kept blocks; None if they differ in more than sizes of 1."""
    left, right = _blocks[left].sizes, _blocks[right].sizes
    pairs = list(zip(left, right))  # noqa: B905  # lengths are compared
    if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in pairs):
        return None
    return _block_of(tuple(max(pair) for pair in pairs)).shape


def _expanded(self, block, shape):
    if block.type.shape is shape:
        return block
    data = np.broadcast_to(block.handle.data, _blocks[id(shape)].sizes)
    handle = interpreter.TensorHandle(data, block.handle.dtype.scalar)
    return self.tensor(handle, core.block_type(block.type.scalar, shape))


def _unwrap(value):
    kind = type(value)
    if kind is core.tensor or kind is int:
        return value
    return value.value if kind is core.constexpr else _unwrap_others(value)


def _is_same_type(self, other):
    return self is other or _is_type(self, other)


def _describe_block(self, element_ty, shape):
    like = _blocks.get(id(shape))
    if like is None:
        like = _block_of(tuple(core._unwrap_if_constexpr(size) for size in shape))
    self.element_ty = element_ty
    self.shape, self.numel = like.shape, like.numel


@cache
def _block_of(sizes):
    block = object.__new__(core.block_type)
    block.sizes = sizes
    _init_block_type(block, int8, list(sizes))
    # It is kept, so no other shape has its id.
    _blocks[id(block.shape)] = block
    return block


def _name_of_block(self):
    return f"<{self.shape}, {self.element_ty}>"


def _describe_tensor(self, handle, of_type):
    self.handle, self.type, self.dtype = handle, of_type, of_type.scalar
    is_block = type(of_type) is core.block_type
    self.shape, self.numel = _shape_of(id(of_type.shape)) if is_block else _NO_SHAPE


@cache
def _shape_of(identity):
    sizes = _blocks[identity].sizes
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _describe_tuple(self, types, fields=None):
    self.types, self.fields = types, fields or [""] * len(types)


def _name_of_tuple(self):
    parts = [f"{field}:{each}" for field, each in zip(self.fields, self.types, strict=True)]
    return f"[{','.join(parts)}]"
