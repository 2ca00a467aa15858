"""Declarations of a model for the code that compiles it, which do nothing by themselves.

They say which dimensions of its inputs are as long as the step has tokens, and which compiler
passes must find something in it.
"""

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin

import torch
from torch import nn

DynamicArgDims = Mapping[str, tuple[int, ...]]
"""Argument of forward -> its dimensions that vary; negative ones count from the end."""

_ATTRIBUTE = "_octavo_dynamic_arg_dims"
_Model = TypeVar("_Model", bound=type[nn.Module])


def support_torch_compile(
    dynamic_arg_dims: Mapping[str, int | Sequence[int]] | None = None,
) -> Callable[[_Model], _Model]:
    """Declares that a model's forward can be traced in one graph.

    dynamic_arg_dims: the dimensions of forward's arguments that are as long as the step has tokens;
        by default dimension 0 of every argument annotated as a tensor. The decorator raises
        ValueError if forward lacks a named argument, or if no dimension varies.
    """

    def declare(model_class: _Model) -> _Model:
        signature = inspect.signature(model_class.forward, eval_str=True)
        declared: dict[str, tuple[int, ...]]
        if dynamic_arg_dims is None:
            declared = {
                name: (0,)
                for name, parameter in signature.parameters.items()
                if _is_tensor(parameter.annotation)
            }
        else:
            declared = {
                name: (dims,) if isinstance(dims, int) else tuple(dims)
                for name, dims in dynamic_arg_dims.items()
            }
        unknown = declared.keys() - signature.parameters.keys()
        if unknown:
            raise ValueError(
                f"{model_class.__name__}.forward takes no {', '.join(sorted(unknown))}"
            )
        if not declared:
            raise ValueError(f"{model_class.__name__}.forward takes no tensor that could vary")
        setattr(model_class, _ATTRIBUTE, types.MappingProxyType(declared))
        return model_class

    return declare


def dynamic_arg_dims_of(model: nn.Module) -> DynamicArgDims:
    """Returns the declaration of a model's class or its nearest base.

    Raises:
        ValueError: there is none.
    """
    declared: DynamicArgDims | None = getattr(type(model), _ATTRIBUTE, None)
    if declared is None:
        raise ValueError(
            f"{type(model).__name__} cannot be compiled: its class does not declare "
            "@support_torch_compile. Run it with --enforce-eager."
        )
    return declared


def expected_passes_of(model: nn.Module) -> Collection[str]:
    """Returns the compiler passes that must match something in a model.

    A model promises them with a method `expected_passes`, which returns their names.
    """
    promise: Callable[[], Collection[str]] | None = getattr(model, "expected_passes", None)
    return () if promise is None else promise()


def _is_tensor(annotation: Any) -> bool:
    """Whether an annotation means a tensor, or an optional one."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_tensor(part) for part in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, torch.Tensor)
