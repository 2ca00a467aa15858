#!/usr/bin/env python3
"""Writes the embedded model in a quantised format, as one of the public tools would.

The quantiser is a reference: it rounds to nearest and calibrates nothing. Tests serve what it
writes; nothing that it writes is committed. Example: scripts/quantize_tiny.py gptq /tmp/tiny-gptq
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TINY = Path(__file__).resolve().parents[1] / "models" / "checkpoints" / "tiny"
WEIGHTS = "model.safetensors"
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that AWQ keeps at each place of a word."""

Parts = dict[str, Tensor]
"""Stored tensors of one module by the last part of their names."""
Quantizer = Callable[[Tensor], tuple[Parts, Tensor]]
"""Maps a weight [N, K] float32 to its stored tensors and their values in float32."""


@dataclass(frozen=True)
class Format:
    """A format of a whole checkpoint."""

    quantize: Quantizer
    config: Mapping[str, Any]
    """quantization_config; in hf_quant_config.json if it names no quant_method."""
    others: Mapping[str, Quantizer] = field(default_factory=dict)
    """Part of a module's name -> the quantiser that replaces the first."""
    cache_scales: tuple[str, ...] = ()
    """Names within self_attn of scales for cached keys and values."""


def write_quantized(source: Path, target: Path, form: Format) -> dict[str, Tensor]:
    """Writes a checkpoint's projections in a format, one folder to another.

    Returns:
        All tensors in float32 with the values that the stored ones have.
    """
    target.mkdir(parents=True, exist_ok=True)
    stored: Parts = {}
    plain: Parts = {}
    tensors = load_file(source / WEIGHTS)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if not module.endswith(("_proj", ".w1", ".w2", ".w3")) or part != "weight":
            stored[name], plain[name] = tensor, tensor.float()
            continue
        chosen = [each for key, each in form.others.items() if key in module]
        parts, plain[name] = (*chosen, form.quantize)[0](tensor.float())
        stored |= {f"{module}.{key}": value.contiguous() for key, value in parts.items()
                   if f"{module}.{key}" not in tensors or key == "weight"}  # fmt: skip
        if module.endswith("q_proj"):
            attention = module.rpartition(".")[0]
            stored |= {f"{attention}.{key}": torch.tensor(0.05) for key in form.cache_scales}
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    save_file(stored, target / WEIGHTS)
    config = json.loads((source / "config.json").read_text())
    if "quant_method" in form.config:
        config["quantization_config"] = dict(form.config)
    else:
        (target / "hf_quant_config.json").write_text(json.dumps(form.config))
    (target / "config.json").write_text(json.dumps(config))
    return plain


def write_plain(source: Path, target: Path, plain: Mapping[str, Tensor]) -> None:
    """Writes float32 values as an unquantised checkpoint, for other programs to load."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, target / WEIGHTS)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))


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
    grouped = weight[:, columns].unflatten(1, (-1, size))
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


def gptq(group_size: int, *, bits: int = 4, symmetric: bool = True, ordered: bool = False,
         zero_offset: int = 1) -> Quantizer:  # fmt: skip
    """Rounds in GPTQ's packing; zero_offset is what the convention takes from zero points."""

    def quantize(weight: Tensor) -> tuple[Parts, Tensor]:
        made = round_to_integers(weight, bits, group_size, symmetric=symmetric, ordered=ordered)
        return {
            "qweight": pack(made.q, bits).t(),
            "qzeros": pack((made.zero.t() - zero_offset) % 2**bits, bits),
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


def compressed(form: str, weights: Mapping[str, Any], activations: object = None,
               **fields: Any) -> dict[str, Any]:  # fmt: skip
    """Returns compressed-tensors' config with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*embed.*"],
        **fields,
    }


def _float8(strategy: str, **fields: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **fields}


def _int(bits: int, size: int, *, symmetric: bool = True, **fields: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy, **fields}


def _gptq(group_size: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False,
            "sym": True, "lm_head": False, **fields}  # fmt: skip


_TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group"}
_QUARK = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}
_MIXED = {
    "config_groups": {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": _int(4, 64)},
        "rest": {"targets": ["Linear"], "weights": _float8("channel"), "input_activations": _TOKEN},
    }
}
_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}

FORMATS: dict[str, Format] = {
    "fp8-block": Format(
        fp8(128, 128, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "fp8-block-64": Format(
        fp8(64, 64, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [64, 64]}
    ),
    "autofp8": Format(
        fp8(0, 0, input_scale=0.02),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        cache_scales=("kv_scale",),
    ),
    "fbgemm-fp8": Format(
        fp8(1, 0), {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}
    ),
    "modelopt-fp8": Format(
        fp8(0, 0, input_scale=0.02),
        {
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                             "exclude_modules": ["lm_head", "*embed*"]},
        },
        cache_scales=("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "modelopt-nvfp4": Format(
        nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
         "exclude_modules": ["lm_head"]},
    ),
    "compressed-fp8-channel": Format(
        fp8(1, 0),
        compressed("float-quantized", _float8("channel"), _TOKEN, kv_cache_scheme=_CACHE),
        cache_scales=("k_scale", "v_scale"),
    ),
    "compressed-fp8-tensor": Format(
        fp8(0, 0), compressed("naive-quantized", _float8("tensor"), _TOKEN)
    ),
    "compressed-fp8-block": Format(
        fp8(128, 128),
        compressed("float-quantized", _float8("block", block_structure=[128, 128]), _TOKEN),
    ),
    "compressed-fp8-group": Format(
        fp8(1, 64), compressed("float-quantized", _float8("group", group_size=64))
    ),
    "compressed-nvfp4": Format(
        nvfp4_packed, compressed("nvfp4-pack-quantized", _FP4 | {"group_size": 16}, _FP4)
    ),
    "compressed-mxfp4": Format(
        mxfp4("weight_packed"), compressed("mxfp4-pack-quantized", _FP4 | {"group_size": 32})
    ),
    "quark-mxfp4": Format(
        mxfp4("weight"),
        {"quant_method": "quark", "global_quant_config": _QUARK, "exclude": ["lm_head", "*gate"]},
    ),
    "awq": Format(awq(64), {**_AWQ, "group_size": 64}),
    "awq-no-zeros": Format(
        awq(32, zero_point=False), {**_AWQ, "group_size": 32, "zero_point": False}
    ),
    "gptq": Format(gptq(64), _gptq(64)),
    "gptq-zeros": Format(gptq(32, symmetric=False), _gptq(32, sym=False)),
    "gptq-act-order": Format(
        gptq(64, symmetric=False, ordered=True), _gptq(64, sym=False, desc_act=True)
    ),
    "gptq-v2": Format(
        gptq(64, symmetric=False, zero_offset=0),
        _gptq(64, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq-channel": Format(gptq(-1), _gptq(-1)),
    "gptq-8-bit": Format(gptq(64, bits=8), _gptq(64, bits=8)),
    "gptq-dynamic": Format(
        gptq(64),
        _gptq(64, dynamic={r"+:.*mlp\.down_proj": {"bits": 8, "group_size": 32}}),
        others={"down_proj": gptq(32, bits=8)},
    ),
    "compressed-int4-32": Format(packed(32), compressed("pack-quantized", _int(4, 32))),
    "compressed-int4-zeros": Format(
        packed(64, symmetric=False), compressed("pack-quantized", _int(4, 64, symmetric=False))
    ),
    "compressed-int4-order": Format(
        packed(64, ordered=True), compressed("pack-quantized", _int(4, 64, actorder="group"))
    ),
    "compressed-int4-channel": Format(packed(-1), compressed("pack-quantized", _int(4, -1))),
    "compressed-int8-packed": Format(
        packed(-1, bits=8), compressed("pack-quantized", _int(8, -1))
    ),
    "compressed-int8": Format(int8, compressed("int-quantized", _int(8, -1))),
    "compressed-mixed": Format(
        fp8(1, 0), compressed("mixed-precision", {}) | _MIXED, others={"self_attn": packed(64)}
    ),
}  # fmt: skip
"""Name -> format, for weights whose columns are multiples of 64."""


def main() -> None:
    """Writes one format of a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--source", type=Path, default=TINY, help="folder of a plain checkpoint")
    args = parser.parse_args()
    write_quantized(args.source, args.target, FORMATS[args.format])


if __name__ == "__main__":
    main()
