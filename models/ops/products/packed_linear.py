"""Products with weights of 4 and 8 bits: octavo::packed_linear. Activations are not rounded."""

import torch
from torch.nn import functional

from models.batch_invariance import is_batch_invariant, row_wise
from models.kernels.gpu import has_kernels
from models.kernels.products.packed.packed_configurations import (
    MOST_PACKED_TOKENS,
    invariant_packed_tiles,
    packed_tiles,
)
from models.kernels.tuning.tiles import PackedTiles
from models.operands.packed_weights import bits_of, columns_per_scale, packed_values
from models.ops.custom_op import operator
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.invariant_linear import invariant_gated_linear, invariant_linear
from models.ops.products.product_like import product_like


@operator(product_like("x"))
def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    """Returns x @ values^T + bias; with a gate silu_and_mul of it.

    On Hopper, warps unpack the weight from shared memory on its way to the tensor cores. Elsewhere,
    and with sizes that these kernels do not take, it is unpacked first, to a tensor of x's dtype.

    Args:
        x: [T, K].
        weight: [N, K / 2] uint8 or [N, K] int8 in kernel order; with a gate 2 * N rows, gate
            before up.
        weight_scale: [N, K / group]; models.operands.packed_weights has the formats.
        weight_zero: of integers, or None.
        bias: [N], or of a gated product [2 * N].
        is_gated: whether a gate follows.

    Returns:
        [T, N].
    """
    packed = (weight, weight_scale, weight_zero)
    if is_batch_invariant():
        return _invariant_linear(x.contiguous(), packed, bias, is_gated=is_gated)
    is_fused = is_gated and bias is None and len(weight) % 16 == 0
    output = _product(x.contiguous(), packed, bias, is_gated=is_fused)
    return silu_and_mul(output) if is_gated and not is_fused else output


def packed_addends(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns packed_linear without a gate, or parts of it to add up, [S, T, N] float32."""
    packed = (weight, weight_scale, weight_zero)
    if is_batch_invariant():
        return _invariant_linear(x.contiguous(), packed, bias, is_gated=False)
    return _product(x.contiguous(), packed, bias, is_gated=False, may_split=True)


Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""A weight, its scales and zeros, as in packed_linear."""


def _product(
    x: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    *,
    is_gated: bool,
    may_split: bool = False,
) -> torch.Tensor:
    """Runs packed_linear in a kernel that unpacks the weight, if one takes it.

    A gated product has no bias, and N is a multiple of 8.
    may_split: returns parts of the sums, [S, T, N] float32, where that is faster.
    """
    weight, scale, zero = packed
    tiles = None
    if has_kernels(x.device):
        tiles = packed_tiles(
            len(x), len(weight), x.shape[1], group=columns_per_scale(weight, scale),
            num_bits=bits_of(weight), is_gated=is_gated, may_split=may_split, dtype=x.dtype,
            device=x.device,
        )  # fmt: skip
    if tiles is None:
        output = functional.linear(x, _values(*packed, x.dtype), bias)
        return silu_and_mul(output) if is_gated else output
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.matrix_linear import matrix_linear
    from models.kernels.products.packed.packed_wide_linear import packed_wide_linear

    if isinstance(tiles, PackedTiles):
        return packed_wide_linear(
            x, weight, bias, tiles, weight_scale=scale, weight_zero=zero, is_gated=is_gated
        )
    return matrix_linear(
        x, weight, bias, tiles, weight_scale=scale, weight_zero=zero, is_gated=is_gated
    )


def _invariant_linear(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, *, is_gated: bool
) -> torch.Tensor:
    """Runs packed_linear; each row's sum has one order for a weight's shape.

    A product of the unpacked weight has the bits of one that unpacks it on its way.
    """
    weight, scale, zero = packed
    if not has_kernels(x.device):
        values = _values(*packed, x.dtype)
        output = row_wise(lambda row: functional.linear(row, values, bias), x)
        return silu_and_mul(output) if is_gated else output
    tiles = invariant_packed_tiles(
        len(x), len(weight), x.shape[1], group=columns_per_scale(weight, scale), dtype=x.dtype,
        device=x.device,
    )  # fmt: skip
    if tiles is None or len(x) > MOST_PACKED_TOKENS:
        product = invariant_gated_linear if is_gated else invariant_linear
        values = _values(*packed, x.dtype)
        # Products read weights before kernels ahead of them have ended: see dependent_launch. This
        # one begins after unpack and takes no part, so that the product finds all values.
        values.new_zeros(1)
        return product(x, values, bias, None)
    # Imported on first use: a CPU installation has no Triton.
    from models.kernels.products.matrix_linear import matrix_linear
    from models.kernels.products.sum_parts import sum_parts

    is_fused = is_gated and bias is None and tiles.splits == 1
    output = matrix_linear(
        x, weight, None, tiles, weight_scale=scale, weight_zero=zero, is_gated=is_fused,
        rounds=is_fused,
    )  # fmt: skip
    if tiles.splits > 1:
        output = sum_parts(output, x.dtype)
    # Only this kernel could add a bias before it rounds.
    output = output if bias is None else output.add_(bias)
    return silu_and_mul(output) if is_gated and not is_fused else output


def _values(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if not has_kernels(weight.device):
        return packed_values(weight, weight_scale, weight_zero, dtype)
    from models.kernels.products.packed.unpack import unpack

    return unpack(weight, weight_scale, weight_zero, dtype)
