"""Registers functions as operators that a compiler must not look into."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "octavo"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: Sequence[str],
    fake_impl: Callable[..., Any] | None = None,
    target_lib: torch.library.Library | None = None,
    dispatch_key: str = "CompositeExplicitAutograd",
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Makes `op_func` callable as torch.ops.octavo.<op_name>.

    Cheaper per call than torch.library.custom_op, which checks aliasing every time.

    Args:
        op_name: name inside the namespace of `target_lib`.
        op_func: the implementation; its annotations give the schema.
        mutates_args: arguments that it writes to.
        fake_impl: makes outputs of the right shape without computing, for tracing.
        target_lib: where to register, if not in Octavo's own library; it must stay alive.
        dispatch_key: the device class that `op_func` serves; by default all of them.
        tags: torch's tags for the operator.
    """
    library = target_lib or _LIBRARY
    schema = torch.library.infer_schema(op_func, mutates_args=tuple(mutates_args))
    library.define(op_name + schema, tags=tuple(tags))  # type: ignore[no-untyped-call]  # torch
    library.impl(op_name, op_func, dispatch_key)  # type: ignore[no-untyped-call]  # torch
    if fake_impl is not None:
        torch.library.register_fake(f"{library.ns}::{op_name}", fake_impl, lib=library)
