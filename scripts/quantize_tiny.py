"""Writes the embedded model in a quantised format, as one of the public tools would.

Tests serve what it writes; nothing that it writes is committed. Example, from the repository's
root: python -m scripts.quantize_tiny gptq /tmp/tiny-gptq
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.quantizers import (
    Parts,
    Quantizer,
    awq,
    fp8,
    gptq,
    int8,
    mxfp4,
    mxfp8,
    nvfp4,
    nvfp4_packed,
    packed,
    quark,
)

TINY = Path(__file__).resolve().parents[1] / "models" / "checkpoints" / "tiny"
WEIGHTS = "model.safetensors"


PROJECTIONS = (
    "_proj", ".w1", ".w2", ".w3", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "output_gate",
    "attention.dense", "shared_mlp.input_linear", "shared_mlp.output_linear",
)  # fmt: skip
"""Ends of the names of modules that are quantised."""
STACKED = "block_sparse_moe.input_linear", "block_sparse_moe.output_linear"
"""Names of stacked experts, in FP8."""


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
        is_stacked = tensor.dim() == 3 and module.endswith(STACKED)
        if part != "weight" or not (is_stacked or module.endswith(PROJECTIONS)):
            stored[name], plain[name] = tensor, tensor.float()
            continue
        chosen = [each for key, each in form.others.items() if key in module]
        parts, plain[name] = _quantized((*chosen, form.quantize)[0], tensor.float())
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


def _quantized(quantize: Quantizer, weight: Tensor) -> tuple[Parts, Tensor]:
    """Quantises a matrix, or each of a stack; returns stored parts and values."""
    if weight.dim() == 2:
        return quantize(weight)
    made = [quantize(matrix) for matrix in weight]
    parts = {key: torch.stack([parts[key] for parts, _ in made]) for key in made[0][0]}
    return parts, torch.stack([values for _, values in made])


def write_plain(source: Path, target: Path, plain: Mapping[str, Tensor]) -> None:
    """Writes float32 values as an unquantised checkpoint, for other programs to load."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, target / WEIGHTS)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))


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


def _quark_int4(dtype: str, pack_method: str, **fields: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "ch_axis": -1, **fields}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "exclude": ["lm_head"],
        "algo_config": [{"name": "awq"}],
        "export": {"pack_method": pack_method, "weight_format": "real_quantized"},
    }


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
    "compressed-mxfp8": Format(
        mxfp8(), compressed("mxfp8-quantized", _float8("group", group_size=32), _TOKEN)
    ),
    "modelopt-mxfp8": Format(
        mxfp8(),
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32,
         "ignore": ["lm_head"]},
    ),
    "minimax-mxfp8": Format(
        mxfp8("weight_scale_inv"),
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
         "ignored_layers": ["lm_head"]},
    ),
    "quark-int4": Format(
        quark(32, is_signed=True), _quark_int4("int4", "reorder", symmetric=True)
    ),
    "quark-uint4": Format(
        quark(32, is_signed=False), _quark_int4("uint4", "reorder", symmetric=False)
    ),
    "quark-uint4-order": Format(
        quark(32, is_signed=False, is_shuffled=False),
        _quark_int4("uint4", "order", symmetric=False),
    ),
    "quark-mxfp8": Format(
        mxfp8(),
        {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {"weight": {
            "dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"
        }}},
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
    "auto-round": Format(
        gptq(64),
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
         "group_size": 64, "sym": True, "data_type": "int",
         "extra_config": {r".*down_proj$": {"bits": 8, "group_size": 32},
                          "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "fp"}}},
        others={"down_proj": gptq(32, bits=8),
                "layers.0.self_attn.q_proj": lambda weight: ({"weight": weight}, weight)},
    ),
    "auto-round-fp8": Format(
        fp8(1, 0),
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8,
         "group_size": -1, "sym": True, "data_type": "fp", "act_bits": 8, "fmt": "e4m3",
         "act_data_type": "fp", "activation_scheme": "static"},
    ),
    "auto-round-fp8-block": Format(
        fp8(128, 128, "weight_scale_inv"),
        {"quant_method": "auto-round", "bits": 8, "group_size": [128, 128], "sym": True,
         "data_type": "fp", "act_bits": 8, "fmt": "e4m3"},
    ),
    "auto-round-mxfp8": Format(
        mxfp8(),
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 8,
         "group_size": 32, "sym": True, "data_type": "mx_fp", "act_bits": 8},
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
    "compressed-int8": Format(
        int8, compressed("int-quantized", _int(8, -1), _TOKEN | {"type": "int"})
    ),
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
