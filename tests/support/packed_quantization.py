"""Rounds weights to the packed formats of products, for tests and benchmarks."""

import torch

from models.number_formats import E2M1_VALUES, E8M0, FP8, FP8_MAX
from models.operands.packed_weights import RUN, pack, signed


def quantize_packed(
    values: torch.Tensor,
    group: int,
    *,
    has_zeros: bool = False,
    is_float: bool = False,
    num_bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rounds values [N, K] to the nearest of 4 bits, or integers of 8.

    Groups are of integers, or with is_float of MXFP4 (32) or NVFP4 (16).

    Returns:
        Weight in kernel order, scales and zeros, as above.
    """
    groups = values.float().view(values.shape[0], -1, group)
    if is_float:
        q, scale = _nearest_floats(groups)
        return pack(q.flatten(1), is_float=True), scale, None
    middle = 1 << num_bits - 1
    zero: torch.Tensor | None = None
    if has_zeros:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / (2 * middle - 1)).clamp(min=1e-10).to(torch.bfloat16)
        zero = (-low / scale.float()).round().clamp(0, 2 * middle - 1).to(torch.uint8)
    else:
        scale = (groups.abs().amax(-1) / (middle - 1)).clamp(min=1e-10).to(torch.bfloat16)
    q = (groups / scale.float().unsqueeze(-1)).round()
    q += middle if zero is None else zero.unsqueeze(-1)
    q = q.clamp(0, 2 * middle - 1).to(torch.uint8).flatten(1)
    if zero is not None and num_bits == 8:
        zero = signed(zero)
    return pack(q, num_bits=num_bits), scale, zero


def _nearest_floats(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the floats of 4 bits of values [N, groups, columns], uint8, and their scales."""
    largest = groups.abs().amax(-1)
    if groups.shape[-1] == RUN:
        exponent = (largest.clamp(min=1e-30) / 6).log2().ceil().clamp(-126, 127) + 127
        scale = exponent.to(torch.uint8)
        steps = scale.view(E8M0).float()
    else:
        of_all = largest.amax().clamp(min=1e-30) / 6 / FP8_MAX
        scale = (largest / 6 / of_all).clamp(min=2.0**-9).to(FP8)
        scale = (scale.float() * of_all).to(torch.bfloat16)
        steps = scale.float()
    table = torch.tensor(E2M1_VALUES, device=groups.device)
    q = (groups / steps.unsqueeze(-1)).unsqueeze(-1).sub(table).abs().argmin(-1)
    return q.to(torch.uint8), scale
