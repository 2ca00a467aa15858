"""Registers functions as operators that a compiler does not look into.

Calls of operators without output can be interrupted, to capture the code between them.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

NAMESPACE = "octavo"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch

_CALLS: dict[Any, Callable[..., Any]] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])

Interrupt = Callable[[Callable[..., Any], tuple[Any, ...]], None]
"""Takes an operator's function and the arguments of an interrupted call."""


@dataclass(frozen=True, slots=True)
class _Interruption:
    operators: Collection[str]
    interrupt: Interrupt


class _Current(threading.local):
    """The interruption of a thread."""

    interruption: _Interruption | None = None


_current = _Current()


def direct_register_custom_op(
    op_name: str,
    op_func: _Function,
    mutates_args: Sequence[str],
    fake_impl: Callable[..., Any] | None = None,
    target_lib: torch.library.Library | None = None,
    dispatch_key: str = "CompositeExplicitAutograd",
    tags: Sequence[torch.Tag] = (),
) -> _Function:
    """Makes `op_func` callable as torch.ops.octavo.<op_name>.

    Cheaper per call than torch.library.custom_op, which checks aliasing every time. The returned
    function takes positional arguments and skips torch's dispatcher unless the program is traced or
    watched.

    Args:
        op_name: name inside the namespace of `target_lib`.
        op_func: the implementation; its annotations give the schema.
        mutates_args: arguments that it writes to.
        fake_impl: makes outputs of the right shape, for tracing; operators without output need
            none.
        target_lib: library to register in, by default Octavo's; it must stay alive.
        dispatch_key: the device class that `op_func` serves; by default all.
        tags: torch's tags for the operator.
    """
    library = target_lib or _LIBRARY
    name = f"{library.ns}::{op_name}"
    schema = torch.library.infer_schema(op_func, mutates_args=tuple(mutates_args))

    @functools.wraps(op_func)
    def interruptible(*args: Any) -> Any:
        interruption = _current.interruption
        if interruption is None or name not in interruption.operators:
            return op_func(*args)
        interruption.interrupt(call, args)
        return None

    implementation = interruptible if schema.endswith("-> ()") else op_func
    library.define(op_name + schema, tags=tuple(tags))  # type: ignore[no-untyped-call]  # torch
    library.impl(op_name, implementation, dispatch_key)  # type: ignore[no-untyped-call]  # torch
    if fake_impl is None and schema.endswith("-> ()"):
        fake_impl = _make_nothing
    if fake_impl is not None:
        torch.library.register_fake(name, fake_impl, lib=library)
    operator = getattr(getattr(torch.ops, library.ns), op_name).default

    @functools.wraps(op_func)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return operator(*args)
        return implementation(*args)

    _CALLS[operator] = call
    return cast("_Function", call)


def operator(
    result: Callable[..., torch.Tensor] | None = None, *, mutates: Sequence[str] = ()
) -> Callable[[_Function], _Function]:
    """Returns a decorator that registers a function under its name.

    Args:
        result: makes an output of the right shape of the operator's arguments, which it takes by
            name, without those left out; None if there is no output.
        mutates: arguments that the operator writes to.
    """

    def register(function: _Function) -> _Function:
        names = tuple(inspect.signature(function).parameters)
        fake = None
        if result is not None:

            def fake(*args: Any) -> torch.Tensor:
                return result(**dict(zip(names, args, strict=False)))

        return direct_register_custom_op(function.__name__, function, mutates, fake)

    return register


def like(name: str) -> Callable[..., torch.Tensor]:
    """Returns what makes a contiguous output like the argument of a name."""
    return lambda **given: given[name].new_empty(given[name].shape)


def direct_call(operator: Any) -> Callable[..., Any] | None:
    """Returns the function of one of our operators, which skips torch's dispatcher; else None."""
    return _CALLS.get(operator)


def _make_nothing(*args: Any, **kwargs: Any) -> None:
    """Fakes an operator without output."""


@contextmanager
def interrupted(operators: Collection[str], interrupt: Interrupt) -> Iterator[None]:
    """Passes the block's calls of some operators, all without output, to `interrupt`.

    Args:
        operators: as namespace::name.
        interrupt: called instead of them, in the same thread.
    """
    assert _current.interruption is None, "interruptions do not nest"
    _current.interruption = _Interruption(operators, interrupt)
    try:
        yield
    finally:
        _current.interruption = None
