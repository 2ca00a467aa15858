"""Weights of 4 and 8 bits: their formats, their order in memory, and their values in PyTorch.

A weight [N, K] of 4 bits is uint8 [N, K / 2]; K is a multiple of 32, and a column of scales belongs
to a group of columns of the weight:

- integers: value = (q - zero) * scale. Scales [N, K / group] bfloat16; zeros uint8 of the same
  shape, or none, which is 8 everywhere. A group has 32 columns or a multiple that divides K.
- MXFP4: value = e2m1(q) * 2^(scale - 127). Scales [N, K / 32] uint8.
- NVFP4: value = e2m1(q) * scale. Scales [N, K / 16] bfloat16: of FP8, times the one of the tensor.

The dtype of the scales and their number name the format. Stored order has column 2 i in the lower
half of byte i. Kernel order is that of Hopper's tensor cores, four bytes of which have eight
columns of a run of 32: byte 4 q + b of a run's 16 has column c + 2 q + 8 h + 16 j for c = b // 2,
j = b % 2, with h = 0 in its lower half and 1 in its upper half. So one word has, for each j and h,
two neighbours, 16 bits apart. Integers of 4 bits stay whole. The bits of floats move within each
half of a word, to where few instructions make pairs of bfloat16 of them; FLOAT_BITS says where.

A weight of 8 bits is int8 [N, K], of integers as above, with zeros int8, or none, which is 0
everywhere. In kernel order byte 4 q + b of each 16 has column c + 2 q + 8 h for c = b // 2 and
h = b % 2. So one word has, for each h, two neighbours, 16 bits apart.

Sources: Frantar et al. 2022, "GPTQ"; Lin et al. 2023, "AWQ"; Open Compute Project 2023, "OCP
Microscaling Formats (MX) Specification", section 5; NVIDIA 2025, "Pretraining Large Language Models
with NVFP4".
"""

import torch

from models.number_formats import E2M1_VALUES, E8M0, NVFP4_RUN

RUN = 32
"""Columns whose order changes together."""
FLOAT_BITS = ((15, 6), (12, 3), (14, 0), (13, 9))
"""Bit of the sign and lowest bit of the magnitude in half a word, of floats 2 * j + h."""


def to_kernel_order(packed: torch.Tensor, *, is_float: bool = False) -> torch.Tensor:
    """Returns a weight of stored order, or stacked ones, in kernel order."""
    if packed.dtype == torch.int8:
        words = packed.view(*packed.shape[:-1], -1, 2, 4, 2)
        return words.movedim(-3, -1).reshape(packed.shape)
    runs = _unpacked(packed).view(*packed.shape[:-1], -1, 2, 2, 4, 2)
    ordered = _packed(runs.movedim((-2, -1), (-4, -3)).reshape(*packed.shape[:-1], -1))
    return _with_moved_bits(ordered) if is_float else ordered


def pack(q: torch.Tensor, *, is_float: bool = False, num_bits: int = 4) -> torch.Tensor:
    """Returns numbers of 4 or 8 bits, [N, K] uint8, as a weight in kernel order."""
    return to_kernel_order(signed(q) if num_bits == 8 else _packed(q), is_float=is_float)


def signed(values: torch.Tensor) -> torch.Tensor:
    """Returns uint8 values less 128, as int8, contiguous."""
    return (values.contiguous() ^ 0x80).view(torch.int8)


def to_stored_order(packed: torch.Tensor, *, is_float: bool = False) -> torch.Tensor:
    """Returns a weight of kernel order, or stacked ones, in stored order."""
    if packed.dtype == torch.int8:
        words = packed.view(*packed.shape[:-1], -1, 4, 2, 2)
        return words.movedim(-1, -3).reshape(packed.shape)
    if is_float:
        packed = _with_bits_back(packed)
    runs = _unpacked(packed).view(*packed.shape[:-1], -1, 4, 2, 2, 2)
    return _packed(runs.movedim((-2, -1), (-4, -3)).reshape(*packed.shape[:-1], -1))


def bits_of(weight: torch.Tensor) -> int:
    """Returns how many bits a number of a weight has."""
    return 8 if weight.dtype == torch.int8 else 4


def num_columns(weight: torch.Tensor) -> int:
    """Returns how many numbers a row of a weight has."""
    return weight.shape[-1] * 8 // bits_of(weight)


def columns_per_scale(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Returns how many columns of a row share a scale."""
    return num_columns(weight) // scale.shape[1]


def has_floats(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Returns whether a weight consists of floats, not integers."""
    return scale.dtype == torch.uint8 or columns_per_scale(weight, scale) == NVFP4_RUN


def packed_values(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values of a weight in kernel order, [N, K], computed in float32, rounded once."""
    is_float = has_floats(weight, scale)
    stored = to_stored_order(weight, is_float=is_float)
    has_bytes = bits_of(weight) == 8
    q = (stored if has_bytes else _unpacked(stored)).int()
    if not is_float:
        middle = 0 if has_bytes else 8
        values = q - (middle if zero is None else _by_column(zero, q).int())
    else:
        values = torch.tensor(E2M1_VALUES, device=q.device)[q]
    if scale.dtype == torch.uint8:
        scale = scale.view(E8M0)
    return (values * _by_column(scale.float(), q)).to(dtype)


def _by_column(of_groups: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return of_groups.repeat_interleave(q.shape[1] // of_groups.shape[1], 1)


def _with_moved_bits(packed: torch.Tensor) -> torch.Tensor:
    """Moves the bits of floats within halves of words to FLOAT_BITS."""
    halves = packed.view(torch.int16)
    moved = torch.zeros_like(halves)
    for number, (sign, lowest) in enumerate(FLOAT_BITS):
        q = halves >> 4 * number
        moved |= (q >> 3 & 1) << sign | (q & 7) << lowest
    return moved.view(torch.uint8)


def _with_bits_back(packed: torch.Tensor) -> torch.Tensor:
    """Undoes _with_moved_bits."""
    halves = packed.contiguous().view(torch.int16)
    back = torch.zeros_like(halves)
    for number, (sign, lowest) in enumerate(FLOAT_BITS):
        back |= ((halves >> sign & 1) << 3 | halves >> lowest & 7) << 4 * number
    return back.view(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Returns the halves of bytes, the lower first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _packed(q: torch.Tensor) -> torch.Tensor:
    return q[..., ::2] | q[..., 1::2] << 4
