"""Compares operators that passes insert with the operators they stand for, as a program runs."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import services.engine.compilation.program.inserted_operators  # noqa: F401  # registers them
from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.operands.head_transform import HeadTransform
from models.operands.latent_entries import LatentEntries, LatentTransform
from models.ops.attention.attention import unified_attention_with_output
from models.ops.attention.head_transform import transform_heads
from models.ops.attention.latent_attention import latent_attention_with_output
from models.ops.attention.latent_transform import transform_latents
from models.ops.custom_op import NAMESPACE
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.experts.moe import fused_moe
from models.ops.products.linear import linear
from models.ops.products.packed_linear import packed_linear
from models.ops.ranks.all_reduce import all_reduce
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from services.engine.compilation.graphs.verdict import Comparison, compare

_ROUNDS = list(signature(unified_attention_with_output).parameters).index("rounds")
_AT_COS = 5
_ROUTED = [each for each in signature(fused_moe).parameters.values() if each.default is each.empty]


class FusionCheck(DispatchMode):
    """Runs each fused operator of a block and, once for each size, the operators it stands for.

    Both see the same inputs. Rows of padding are not compared: their content is undefined.
    Attention is compared where it stores a step's keys before it attends. Our kernels do both at
    once, and dummy requests read slots of the null block that others of the step write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comparisons: list[Comparison] = []
        """One for each result of each operator and size."""
        self._seen: set[tuple[Any, ...]] = set()

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation and compares its results if it is a fused operator."""
        unfused = _UNFUSED.get(func._schema.name)
        if unfused is None or kwargs:
            return func(*args, **kwargs)
        size = (func, *(_size(arg) for arg in args))
        at_cos = _COS.get(unfused)
        is_plain = (at_cos is not None and not _is_comparable(args, at_cos)) or (
            func in _GATED and not args[-1]
        )
        if size in self._seen or is_plain:
            return func(*args)
        self._seen.add(size)
        given: list[Any] = [
            arg.clone() if isinstance(arg, Tensor) and argument.alias_info is not None else arg
            for arg, argument in zip(args, func._schema.arguments, strict=False)
        ]
        result = func(*args)
        written = [(mine, its) for mine, its in zip(given, args, strict=True) if mine is not its]
        expected = unfused(*given)
        pairs = written if result is None else [(expected, result), *written]
        num_tokens = get_forward_context().context.num_tokens
        self.comparisons += (
            compare(mine[:num_tokens], its[:num_tokens], of=func._schema.name)
            for mine, its in pairs
        )
        return result


def _size(arg: Any) -> object:
    """Returns what kernels are chosen by; layers of one kind differ in their number alone."""
    if isinstance(arg, Tensor):
        return arg.shape, arg.dtype
    if isinstance(arg, list):
        return tuple(arg)
    return None if type(arg) is int else arg


def _is_comparable(args: tuple[Any, ...], at_cos: int) -> bool:
    """Returns whether attention was given cos, and none of the parameters that change its output.

    The dispatcher leaves out defaults at the end.
    """
    has_transform = any(isinstance(arg, Tensor) for arg in args[at_cos : at_cos + 1])
    rounds = at_cos == _AT_COS and any(args[_ROUNDS:])
    return has_transform and not rounds and not has_kernels(args[0].device)


_Step = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""Takes the tensor that the step before made, at first x, and all arguments by name."""


def _product(
    weight: str = "weight",
    bias: str = "bias",
    scale: str = "weight_scale",
    *,
    gate: str = "is_gated",
    is_gated: bool = False,
) -> _Step:
    """Returns a product of these operands, which nothing takes the place of without a weight."""

    def step(x: Tensor, given: Mapping[str, Any]) -> Tensor:
        if given[weight] is None:
            return x
        # Attention rounds what the first product takes.
        is_rounded = weight == "weight" and given.get("is_rounded", False)
        output = linear(x, given[weight], given[bias], given.get(scale), is_rounded)
        return silu_and_mul(output) if given.get(gate, is_gated) else output

    return step


def _norm(weight: str = "norm_weight", eps: str = "eps") -> _Step:
    return lambda x, given: rms_norm(x, given[weight], given[eps])


def _sum(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    residual: Tensor = given["residual"]
    return residual.add_(x)


def _reduced(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Communicates once more; all ranks compare in the same order."""
    return all_reduce(x, given["group"])


def _packed(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    names = ("weight", "weight_scale", "weight_zero", "bias")
    weight, scale, zero, bias = (given[name] for name in names)
    return packed_linear(x, weight, scale, zero, bias, False)


def _adapted(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    *operands, _ = given.values()
    assert operands[0] is x, "its adapters take what it takes"
    output: Tensor = torch.ops.octavo.adapted_linear(*operands, False)
    return output


def _gate(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    del given
    return silu_and_mul(x)


_GATED = (torch.ops.octavo.packed_linear.default, torch.ops.octavo.adapted_linear.default)
"""Operators that stand for nothing else unless their last argument is true."""
_FIRST = _product(gate="")
_NEXT = _product("next_weight", "next_bias", "next_weight_scale")
_STEPS: dict[str, tuple[_Step, ...]] = {
    "gated_linear": (_product(is_gated=True),),
    "norm_linear": (_norm(), _product()),
    "add_norm_linear": (_sum, _norm(), _product()),
    "linear_residual": (_FIRST, _sum),
    "linear_residual_norm": (_FIRST, _sum, _norm()),
    "linear_residual_norm_linear": (_FIRST, _sum, _norm(), _NEXT),
    "feed_forward": (
        _FIRST, _sum, _norm(),
        _product("gate_up", "gate_up_bias", "gate_up_scale", is_gated=True),
        _product("down", "down_bias", "down_scale"),
        _sum, _norm("last_norm_weight", "last_eps"),
        _product("next_weight", "next_bias", "next_scale", gate="is_next_gated"),
    ),
    "packed_linear": (_packed, _gate),
    "adapted_linear": (_adapted, _gate),
    "packed_linear_residual_norm": (_packed, _sum, _norm()),
    "add_rms_norm": (_sum, _norm("weight")),
    "all_reduce_norm": (_reduced, _sum, _norm("weight")),
    "all_reduce_norm_linear": (_reduced, _sum, _norm(), _product()),
}  # fmt: skip
"""Steps of operators with products and norms, in order."""


def _stepwise(name: str, steps: tuple[_Step, ...]) -> Callable[..., Tensor | None]:
    names = [each.name for each in getattr(torch.ops.octavo, name).default._schema.arguments]

    def run(*args: Any) -> Tensor:
        given = dict(zip(names, args, strict=False))
        output: Tensor = given["x"]
        for step in steps:
            output = step(output, given)
        return output

    return run


def _fused_moe_with_shared(hidden: Tensor, *others: Any) -> Tensor:
    routed, shared = others[: len(_ROUTED) - 1], others[len(_ROUTED) - 1 :]
    weight, scale, bias, down, down_scale, down_bias, *gates = shared
    gated = silu_and_mul(linear(hidden, weight, bias, scale))
    output = linear(gated, down, down_bias, down_scale)
    if gates and gates[0] is not None:
        output = linear(hidden, gates[0], None).sigmoid() * output
    return fused_moe(hidden, *routed) + output


def _attention(  # noqa: PLR0913  # as the operator
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    layer_index: int,
    cos: Tensor,
    signed_sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    *others: Any,
) -> None:
    """Writes the same keys and values once more, which changes nothing."""
    transform = HeadTransform(
        cos=cos, signed_sin=signed_sin, q_weight=q_weight, k_weight=k_weight, eps=eps
    )
    q, k = transform_heads(q, k, transform)
    unified_attention_with_output(
        q, k, v, output, layer_index, None, None, None, None, 0.0, *others
    )


def _latent_attention(*args: Any) -> None:
    """Writes the same entries once more, which changes nothing."""
    plain, q, latent, k, *others = args[:13]
    cos, signed_sin, weight, eps = args[13:]
    transform = LatentTransform(cos=cos, signed_sin=signed_sin, weight=weight, eps=eps)
    entries = LatentEntries(latent=latent, rotated=k, index_keys=None)
    q, entries = transform_latents(q, entries, transform)
    latent_attention_with_output(plain, q, entries.latent, entries.rotated, *others)


_COS: dict[Callable[..., Tensor | None], int] = {_attention: _AT_COS, _latent_attention: 13}
"""The argument of each kind of attention that says it rotates queries and keys."""
_UNFUSED: dict[str, Callable[..., Tensor | None]] = {
    f"{NAMESPACE}::{name}": unfused
    for name, unfused in (
        *((name, _stepwise(name, steps)) for name, steps in _STEPS.items()),
        ("fused_moe_with_shared", _fused_moe_with_shared),
        ("unified_attention_with_output", _attention),
        ("latent_attention_with_output", _latent_attention),
    )
}
