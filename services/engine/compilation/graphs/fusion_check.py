"""Compares operators that passes insert with the operators they stand for, as a program runs."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor

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
            unfused is _packed_linear and not args[-1]
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
        pairs = written if expected is None else [(expected, result), *written]
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
    return None if type(arg) is int else arg


def _is_comparable(args: tuple[Any, ...], at_cos: int) -> bool:
    """Returns whether attention was given cos, and none of the parameters that change its output.

    The dispatcher leaves out defaults at the end.
    """
    has_transform = any(isinstance(arg, Tensor) for arg in args[at_cos : at_cos + 1])
    rounds = at_cos == _AT_COS and any(args[_ROUNDS:])
    return has_transform and not rounds and not has_kernels(args[0].device)


def _gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale: Tensor | None = None
) -> Tensor:
    return silu_and_mul(linear(x, weight, bias, weight_scale))


def _packed_linear(  # as the operator
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor | None,
    bias: Tensor | None,
    is_gated: bool,
) -> Tensor:
    assert is_gated, "without a gate it stands for nothing else"
    operands = (weight, weight_scale, weight_zero, bias)
    return silu_and_mul(packed_linear(x, *operands, False))


def _packed_linear_residual_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    product = packed_linear(x, weight, weight_scale, weight_zero, bias, False)
    return _add_rms_norm(product, residual, norm_weight, eps)


def _norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    weight_scale: Tensor | None = None,
) -> Tensor:
    product = _gated_linear if is_gated else linear
    return product(rms_norm(x, norm_weight, eps), weight, bias, weight_scale)


def _add_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    weight_scale: Tensor | None = None,
) -> Tensor:
    residual.add_(x)
    return _norm_linear(residual, norm_weight, eps, weight, bias, is_gated, weight_scale)


def _linear_residual(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor | None = None,
    is_rounded: bool = False,
) -> None:
    residual.add_(linear(x, weight, bias, weight_scale, is_rounded))


def _linear_residual_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight_scale: Tensor | None = None,
    is_rounded: bool = False,
) -> Tensor:
    _linear_residual(residual, x, weight, bias, weight_scale, is_rounded)
    return rms_norm(residual, norm_weight, eps)


def _linear_residual_norm_linear(  # noqa: PLR0913  # as the operator
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    is_gated: bool,
    weight_scale: Tensor | None = None,
    next_weight_scale: Tensor | None = None,
    is_rounded: bool = False,
) -> Tensor:
    _linear_residual(residual, x, weight, bias, weight_scale, is_rounded)
    following = (next_weight, next_bias, is_gated, next_weight_scale)
    return _norm_linear(residual, norm_weight, eps, *following)


def _feed_forward(  # noqa: PLR0913  # as the operator
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    last_norm_weight: Tensor,
    last_eps: float,
    next_weight: Tensor | None,
    next_bias: Tensor | None,
    is_next_gated: bool,
    weight_scale: Tensor | None,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    next_scale: Tensor | None,
    is_rounded: bool = False,
) -> Tensor:
    _linear_residual(residual, x, weight, bias, weight_scale, is_rounded)
    inner = _norm_linear(residual, norm_weight, eps, gate_up, gate_up_bias, True, gate_up_scale)
    _linear_residual(residual, inner, down, down_bias, down_scale)
    if next_weight is None:
        return rms_norm(residual, last_norm_weight, last_eps)
    following = (next_weight, next_bias, is_next_gated, next_scale)
    return _norm_linear(residual, last_norm_weight, last_eps, *following)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def _all_reduce_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str) -> Tensor:
    """Communicates once more; all ranks compare in the same order."""
    return _add_rms_norm(all_reduce(x, group), residual, weight, eps)


def _all_reduce_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str, *product: Any
) -> Tensor:
    """Communicates once more; all ranks compare in the same order."""
    return _add_norm_linear(all_reduce(x, group), residual, norm_weight, eps, *product)


def _fused_moe_with_shared(hidden: Tensor, *others: Any) -> Tensor:
    routed, shared = others[: len(_ROUTED) - 1], others[len(_ROUTED) - 1 :]
    weight, scale, bias, down, down_scale, down_bias = shared
    output = linear(_gated_linear(hidden, weight, bias, scale), down, down_bias, down_scale)
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
    plain, q, latent, k, *others = args[:12]
    cos, signed_sin, weight, eps = args[12:]
    transform = LatentTransform(cos=cos, signed_sin=signed_sin, weight=weight, eps=eps)
    entries = LatentEntries(latent=latent, rotated=k, index_keys=None)
    q, entries = transform_latents(q, entries, transform)
    latent_attention_with_output(plain, q, entries.latent, entries.rotated, *others)


_COS: dict[Callable[..., Tensor | None], int] = {_attention: _AT_COS, _latent_attention: 12}
"""The argument of each kind of attention that says it rotates queries and keys."""
_UNFUSED: dict[str, Callable[..., Tensor | None]] = {
    f"{NAMESPACE}::{name}": unfused
    for name, unfused in (
        ("gated_linear", _gated_linear),
        ("packed_linear", _packed_linear),
        ("packed_linear_residual_norm", _packed_linear_residual_norm),
        ("norm_linear", _norm_linear),
        ("add_norm_linear", _add_norm_linear),
        ("feed_forward", _feed_forward),
        ("linear_residual", _linear_residual),
        ("linear_residual_norm", _linear_residual_norm),
        ("linear_residual_norm_linear", _linear_residual_norm_linear),
        ("add_rms_norm", _add_rms_norm),
        ("all_reduce_norm", _all_reduce_norm),
        ("all_reduce_norm_linear", _all_reduce_norm_linear),
        ("fused_moe_with_shared", _fused_moe_with_shared),
        ("unified_attention_with_output", _attention),
        ("latent_attention_with_output", _latent_attention),
    )
}
