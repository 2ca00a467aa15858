"""The quantisers of quantize_tiny: a weight's stored tensors, as public tools write them.

They are references: they round to nearest and calibrate nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
ONES = {4: 0x11111111, 8: 0x01010101}
"""The column that AWQ keeps at each place of a word."""

Parts = dict[str, Tensor]
"""Stored tensors of one module by the last part of their names."""
Quantizer = Callable[[Tensor], tuple[Parts, Tensor]]
"""Maps a weight [N, K] float32 to its stored tensors and their values in float32."""


def fp8(rows: int, columns: int, scale_name: str = "weight_scale", **extra: float) -> Quantizer:
    """Rounds blocks to FP8; 0 rows or columns mean all. `extra` adds scalars."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        block = rows or weight.shape[0], columns or weight.shape[1]
        values, product = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
        counts = [-(-size // each) for size, each in zip(weight.shape, block, strict=True)]
        scales = torch.empty(counts)
        for i in range(counts[0]):
            for j in range(counts[1]):
                part = (slice(i * block[0], (i + 1) * block[0]),
                        slice(j * block[1], (j + 1) * block[1]))  # fmt: skip
                scales[i, j] = weight[part].abs().max() / FP8_MAX
                values[part] = (weight[part] / scales[i, j]).to(FP8)
                product[part] = values[part].float() * scales[i, j]
        stored = scales if rows or columns else scales[0, 0]
        return {
            "weight": values,
            scale_name: stored,
            **{key: torch.tensor(value) for key, value in extra.items()},
        }, product

    return quantize


@dataclass(frozen=True)
class Integers:
    """A matrix of integers with groups: (q - zero) * scale."""

    q: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor
    """The group of each column."""
    values: Tensor


def round_to_integers(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool, ordered: bool = False
) -> Integers:
    """Rounds a weight; `ordered` groups its columns in an order that depends on the input alone.

    Tools take the order from the inputs of calibration, so projections of one input share it.
    """
    num_columns = weight.shape[1]
    size, largest = group_size if group_size > 0 else num_columns, 2**bits - 1
    columns = torch.arange(num_columns)
    if ordered:
        columns = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
    group = torch.empty(num_columns, dtype=torch.int32)
    group[columns] = (torch.arange(num_columns) // size).int()
    # A last group with fewer columns is filled up with zeros, which change no scale.
    padded = torch.nn.functional.pad(weight[:, columns], (0, -num_columns % size))
    grouped = padded.unflatten(1, (-1, size))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        scale = (2 * torch.maximum(high, -low) / largest).half().clamp(min=1e-6)
        zero = torch.full(scale.shape, 2 ** (bits - 1))
    else:
        scale = ((high - low) / largest).half().clamp(min=1e-6)
        zero = (-low / scale.float()).round().clamp(0, largest).int()
    by_column = scale.float()[:, group], zero[:, group]
    q = ((weight / by_column[0]).round() + by_column[1]).clamp(0, largest).int()
    return Integers(q, scale, zero, group, (q - by_column[1]) * by_column[0])


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs the last dimension into 32-bit words, low bits first; pads with zeros."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[-1] % per_word))
    words = padded.unflatten(-1, (-1, per_word))
    total = sum(words[..., place] << (bits * place) for place in range(per_word))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def awq(group_size: int, *, zero_point: bool = True) -> Quantizer:
    """Rounds to 4 bits in AWQ's gemm packing."""

    def shuffled(values: Tensor) -> Tensor:
        return pack(values.unflatten(-1, (-1, 8))[..., list(AWQ_COLUMNS)].flatten(-2), 4)

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        made = round_to_integers(weight, 4, group_size, symmetric=not zero_point)
        parts = {"qweight": shuffled(made.q.t()), "scales": made.scale.t()}
        if zero_point:
            parts["qzeros"] = shuffled(made.zero.t())
        return parts, made.values

    return quantize


def quark(group_size: int, *, is_signed: bool, is_shuffled: bool = True) -> Quantizer:
    """Rounds to 4 bits in Quark's packing; signed integers have zero points of 0."""

    def words(values: Tensor) -> Tensor:
        values = (values - 8) % 16 if is_signed else values
        octets = values.unflatten(-1, (-1, 8))
        return pack((octets[..., list(AWQ_COLUMNS)] if is_shuffled else octets).flatten(-2), 4)

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        made = round_to_integers(weight, 4, group_size, symmetric=is_signed)
        return {
            "weight": words(made.q.t()),
            "weight_scale": made.scale.t(),
            "weight_zero_point": words(made.zero.t()),
        }, made.values

    return quantize


def gptq(group_size: int, *, bits: int = 4, symmetric: bool = True, ordered: bool = False,
         zero_offset: int = 1) -> Quantizer:  # fmt: skip
    """Rounds in GPTQ's packing; zero_offset is what the convention takes from zero points."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        made = round_to_integers(weight, bits, group_size, symmetric=symmetric, ordered=ordered)
        return {
            "qweight": pack(made.q, bits).t(),
            "qzeros": pack(made.zero.t(), bits) - zero_offset * ONES[bits],
            "scales": made.scale.t(),
            "g_idx": made.group,
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }, made.values

    return quantize


def packed(group_size: int, *, bits: int = 4, symmetric: bool = True,
           ordered: bool = False) -> Quantizer:  # fmt: skip
    """Rounds in compressed-tensors' pack-quantized form."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        made = round_to_integers(weight, bits, group_size, symmetric=symmetric, ordered=ordered)
        parts = {
            "weight_packed": pack(made.q, bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(made.zero.t(), bits).t()
        if ordered:
            parts["weight_g_idx"] = made.group
        return parts, made.values

    return quantize


def int8(weight: Tensor) -> tuple[Parts, Tensor]:
    """Rounds rows to 8-bit integers, one to a byte."""
    made = round_to_integers(weight, 8, -1, symmetric=True)
    return {"weight": (made.q - 128).to(torch.int8), "weight_scale": made.scale}, made.values


def _to_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 4-bit floats packed by two, the first in the lower half, and their values."""
    code = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    bits = (code + 8 * (values < 0)).to(torch.uint8)
    return bits[:, ::2] | bits[:, 1::2] << 4, E2M1[code] * values.sign()


def mxfp4(name: str) -> Quantizer:
    """Rounds to MXFP4; `name` is that of the packed tensor."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        runs = weight.unflatten(1, (-1, 32))
        exponent = (runs.abs().amax(-1).clamp(min=1e-20) / 6).log2().ceil().clamp(-127, 127)
        scale = exponent.exp2().repeat_interleave(32, 1)
        bits, values = _to_e2m1(weight / scale)
        return {name: bits, "weight_scale": (exponent + 127).to(torch.uint8)}, values * scale

    return quantize


def mxfp8(scale_name: str = "weight_scale") -> Quantizer:
    """Rounds to MXFP8."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        runs = weight.unflatten(1, (-1, 32))
        exponent = (runs.abs().amax(-1).clamp(min=1e-20) / FP8_MAX).log2().ceil().clamp(-127, 127)
        scale = exponent.exp2().repeat_interleave(32, 1)
        stored = (weight / scale).to(FP8)
        parts = {"weight": stored, scale_name: (exponent + 127).to(torch.uint8)}
        return parts, stored.float() * scale

    return quantize


def nvfp4(weight: Tensor) -> tuple[Parts, Tensor]:
    """Rounds to NVFP4, as ModelOpt names it."""
    outer = weight.abs().max() / (6 * FP8_MAX)
    runs = weight.unflatten(1, (-1, 16))
    scale = (runs.abs().amax(-1) / 6 / outer).to(FP8)
    factor = (scale.float() * outer).repeat_interleave(16, 1)
    bits, values = _to_e2m1(torch.where(factor > 0, weight / factor, 0.0))
    parts = {"weight": bits, "weight_scale": scale, "weight_scale_2": outer}
    return parts | {"input_scale": torch.tensor(0.01)}, values * factor


def nvfp4_packed(weight: Tensor) -> tuple[Parts, Tensor]:
    """Rounds to NVFP4, as compressed-tensors names it; the outer scale is a divisor."""
    parts, _ = nvfp4(weight)
    divisor = (1 / parts["weight_scale_2"]).reshape(1)
    codes = torch.stack((parts["weight"] & 15, parts["weight"] >> 4), -1).flatten(-2).long()
    signs = 1.0 - 2.0 * (codes >> 3)
    scale = (parts["weight_scale"].float() / divisor).repeat_interleave(16, 1)
    return {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([100.0]),
    }, E2M1[codes & 7] * signs * scale
