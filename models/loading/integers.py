"""Integer weights of 4 or 8 bits: unpacks the layouts of several tools and multiplies them out.

A value is (q - zero) * scale. Scales and zeros belong to groups of columns of a row.
Sources: github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py; github.com/AutoGPTQ/AutoGPTQ,
auto_gptq/nn_modules/qlinear; github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py;
github.com/vllm-project/compressed-tensors, compressors; amd-quark, quark/torch/utils/pack.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch

STRIP_ROWS = 1024
"""Rows that are multiplied out at a time, in float32."""
AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of its packing AWQ keeps each of eight columns."""
ONES = {4: 0x11111111, 8: 0x01010101}
"""Bits of an integer -> the 32-bit word that holds nothing but ones of them."""

SIGNS = 0x88888888 - 2**32
"""The 32-bit word whose bits are the signs of eight integers of 4 bits."""

Layout = Literal["compressed-tensors", "int8", "awq", "quark", "gptq"]
"""Of stored tensors; that of Quark is AWQ's with the columns of a word in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerFormat:
    """How a matrix is stored as integers, and the names of its stored parts."""

    layout: Layout
    num_bits: int
    shape: tuple[int, int]
    """Rows (outputs) and columns (inputs) of the matrix."""
    parts: tuple[str, ...]
    """The meanings of the stored tensors, in order: q, scale, and maybe zero and order."""
    zero_offset: int = 0
    is_signed: bool = False
    """Whether words of AWQ's layout hold signed integers."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A matrix [N, K] of unsigned integers, one to a byte, with scales for groups of columns.

    q: [N, K] uint8.
    scale: [N, G] or [1, 1], as stored.
    zero: [N, G] or [1, 1], uint8; None: half of the range, everywhere.
    order: [K], the group of each column; None: equal runs.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    order: torch.Tensor | None
    num_bits: int

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix, computed in float32 and rounded once, [N, K] of `dtype`."""
        num_rows, num_columns = self.q.shape
        result = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
        for first in range(0, num_rows, STRIP_ROWS):
            rows = slice(first, first + STRIP_ROWS)
            zero: torch.Tensor | float = 2.0 ** (self.num_bits - 1)
            if self.zero is not None:
                zero = self._by_column(self.zero, rows, num_columns)
            scale = self._by_column(self.scale, rows, num_columns)
            result[rows] = (self.q[rows].to(torch.float32) - zero) * scale
        return result

    def _by_column(self, groups: torch.Tensor, rows: slice, num_columns: int) -> torch.Tensor:
        """Returns some rows of scales or zeros, repeated for each column or one for all."""
        part = (groups if len(groups) == 1 else groups[rows]).to(torch.float32)
        if part.shape[1] == 1:
            return part
        if self.order is not None:
            return part[:, self.order.long()]
        return part.repeat_interleave(num_columns // part.shape[1], dim=1)


def unpack_words(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Returns the integers of 32-bit words, low bits first: uint8 [..., 32 / bits * M]."""
    # A matrix of one column may call itself contiguous, whatever the stride of its columns.
    octets = packed.flatten().view(torch.uint8).view(*packed.shape[:-1], -1)
    if num_bits == 8:
        return octets
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)


def read_integers(*tensors: torch.Tensor, stored: IntegerFormat) -> IntegerWeight:
    """Unpacks the stored tensors of one matrix, in order of `stored.parts`."""
    parts = dict(zip(stored.parts, tensors, strict=True))
    return IntegerWeight(
        stored_q(parts["q"], stored),
        stored_scale(parts["scale"], stored),
        stored_zero(parts["zero"], stored) if "zero" in parts else None,
        parts.get("order"),
        stored.num_bits,
    )


def stored_q(q: torch.Tensor, stored: IntegerFormat) -> torch.Tensor:
    """Returns the integers of a matrix, [N, K] uint8."""
    if stored.layout in ("awq", "quark"):
        return _unpack_columns(q, stored).t()
    if stored.layout == "gptq":
        return unpack_words(q.t(), stored.num_bits)
    if stored.layout == "compressed-tensors":
        return unpack_words(q, stored.num_bits)[:, : stored.shape[1]]
    return _unsigned(q)


def stored_scale(scale: torch.Tensor, stored: IntegerFormat) -> torch.Tensor:
    """Returns the scales of a matrix, [N, G] or [1, 1]."""
    return _as_groups(scale.t() if stored.layout in ("awq", "quark", "gptq") else scale)


def stored_zero(zero: torch.Tensor, stored: IntegerFormat) -> torch.Tensor:
    """Returns the zero points of a matrix, [N, G] or [1, 1] uint8."""
    bits = stored.num_bits
    if stored.layout in ("awq", "quark"):
        zero = _unpack_columns(zero, stored).t()
    elif stored.layout == "gptq":
        # Tools take the offset from whole words: a zero point of 0 borrows from the next one.
        zero = unpack_words(zero + stored.zero_offset * ONES[bits], bits).t()[: stored.shape[0]]
    elif stored.layout == "compressed-tensors":
        zero = unpack_words(zero.t(), bits).t()[: stored.shape[0]]
    else:
        zero = _unsigned(zero)
    return _as_groups(zero)


def dequantize_integers(
    *tensors: torch.Tensor, stored: IntegerFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values of the stored tensors of one matrix, [N, K] of `dtype`."""
    return read_integers(*tensors, stored=stored).values(dtype)


def _unpack_columns(packed: torch.Tensor, stored: IntegerFormat) -> torch.Tensor:
    """Returns the integers of words with 8 columns, [..., M] to [..., 8 * M] uint8.

    Signed ones become unsigned by half of the range, as do their zero points.
    """
    if stored.is_signed:
        packed = packed ^ SIGNS
    in_order = unpack_words(packed, 4)
    if stored.layout == "quark":
        return in_order
    words = *packed.shape, len(AWQ_POSITIONS)
    positions = torch.tensor(AWQ_POSITIONS, device=packed.device)
    return in_order.reshape(words).index_select(-1, positions).flatten(-2)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """Returns int8 values plus 128, as uint8."""
    return values.view(torch.uint8) ^ 0x80


def _as_groups(values: torch.Tensor) -> torch.Tensor:
    """Returns scales or zeros with two dimensions."""
    return values.reshape(-1, 1) if values.dim() < 2 else values
