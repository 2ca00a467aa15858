"""Products with weights of 4 bits: octavo::packed_linear. Activations are not rounded."""

import torch
from torch.nn import functional

from models.ops.custom_op import direct_register_custom_op
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.kernel_choice import has_kernels
from models.ops.operands.packed_weights import packed_values
from models.ops.triton.linear.linear_configurations import packed_tiles


def _packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    """Returns x @ values^T + bias; with a gate silu_and_mul of it.

    Few tokens are multiplied with what the tensor cores' warps unpack from shared memory; for more
    the weight is unpacked first, to a tensor of x's dtype.

    Args:
        x: [T, K].
        weight: [N, K / 2] uint8 in kernel order; with a gate 2 * N rows, gate before up.
        weight_scale: [N, K / group]; models.ops.operands.packed_weights has the formats.
        weight_zero: of integers, or None.
        row_scale: of NVFP4, or None.
        bias: [N], or of a gated product [2 * N].
        is_gated: whether a gate follows.

    Returns:
        [T, N].
    """
    if has_kernels(x.device) and not (is_gated and bias is not None):
        x = x.contiguous()
        num_outputs = weight.shape[0] // (2 if is_gated else 1)
        tiles = packed_tiles(
            *x.shape[:1], num_outputs, x.shape[1], group=x.shape[1] // weight_scale.shape[1],
            is_gated=is_gated, dtype=x.dtype, device=x.device,
        )  # fmt: skip
        if tiles is not None:
            # Imported on first use: a CPU installation has no Triton.
            from models.ops.triton.linear.matrix_linear import matrix_linear

            return matrix_linear(
                x, weight, bias, tiles, weight_scale=weight_scale, weight_zero=weight_zero,
                row_scale=row_scale, is_gated=is_gated,
            )  # fmt: skip
    unpacked = _values(weight, weight_scale, weight_zero, row_scale, x.dtype)
    output = functional.linear(x, unpacked, bias)
    return silu_and_mul(output) if is_gated else output


def _values(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if not has_kernels(weight.device):
        return packed_values(weight, weight_scale, weight_zero, row_scale, dtype)
    from models.ops.triton.linear.unpack import unpack

    return unpack(weight, weight_scale, weight_zero, row_scale, dtype)


def _fake_packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    del weight_scale, weight_zero, row_scale, bias
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if is_gated else 1)))


packed_linear = direct_register_custom_op("packed_linear", _packed_linear, (), _fake_packed_linear)
