"""Reads the quantization_config of tools for floats of 8 and 4 bits: FP8, MXFP8, ModelOpt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.quantization.compressed_tensors import MXFP4_GROUP, MXFP8_BLOCK, NVFP4_GROUP
from models.quantization.config import QuantizationConfig, QuantizationError, WeightScheme
from models.quantization.fields import (
    read_choice,
    read_names,
    read_pair,
    require_pattern,
    section,
)

MODELOPT_SCHEMES = {
    "FP8": WeightScheme(kind="fp8", activations="fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme(kind="fp8", activations="fp8"),
    "FP8_PB_WO": WeightScheme(kind="fp8", block_size=(128, 128)),
    "NVFP4": WeightScheme(kind="nvfp4", group_size=NVFP4_GROUP, activations="fp4"),
    "W4A16_NVFP4": WeightScheme(kind="nvfp4", group_size=NVFP4_GROUP),
    "MXFP4": WeightScheme(kind="mxfp4", group_size=MXFP4_GROUP),
    "MXFP8": WeightScheme(
        kind="fp8", block_size=MXFP8_BLOCK, group_size=MXFP8_BLOCK[1], activations="fp8"
    ),
}
"""ModelOpt's quant_algo -> how weights are stored."""
MIXED = "MIXED_PRECISION"
"""ModelOpt's quant_algo of layers with formats of their own."""
_SINGLE_EXPERTS = "*.experts.*"
"""Modules of routed experts that are stored one by one."""


def read_fp8(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the form of DeepSeek and Qwen (blocks) and of older tools (one scale per tensor).

    DeepSeek V4's experts may be MXFP4.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    read_choice(fields, "fmt", ("e4m3", "float8_e4m3fn"))
    block_size = read_pair(fields, "weight_block_size")
    activations = read_choice(fields, "activation_scheme", ("dynamic", "static"))
    if activations == "static" and block_size is not None:
        raise QuantizationError("activation_scheme", activations, "dynamic with weight_block_size")
    is_old = fields.get("modules_to_not_convert") is None
    scheme = WeightScheme(kind="fp8", block_size=block_size, activations="fp8")
    schemes: tuple[WeightScheme, ...] = (scheme,)
    if read_choice(fields, "expert_dtype", ("fp8", "fp4")) == "fp4":
        experts = WeightScheme(kind="mxfp4", group_size=MXFP4_GROUP, targets=(_SINGLE_EXPERTS,))
        schemes = experts, scheme
    return QuantizationConfig(
        method="fp8",
        schemes=schemes,
        ignored=read_names(fields, "ignored_layers" if is_old else "modules_to_not_convert"),
    )


def read_mxfp8(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the form of MiniMax: FP8 in runs of 32 that share an exponent.

    Raises:
        QuantizationError: a field is ill-typed, or the weights have another form.
    """
    size = read_pair(fields, "weight_block_size")
    if size not in (None, MXFP8_BLOCK):
        raise QuantizationError("weight_block_size", list(size), str(list(MXFP8_BLOCK)))
    return replace(read_fp8({**fields, "weight_block_size": list(MXFP8_BLOCK)}), method="mxfp8")


def read_stacked_mxfp4(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the form of gpt-oss: MXFP4 in experts only.

    Raises:
        QuantizationError: a field is ill-typed.
    """
    scheme = WeightScheme(kind="mxfp4", group_size=MXFP4_GROUP)
    ignored = read_names(fields, "modules_to_not_convert")
    return QuantizationConfig(method="mxfp4", schemes=(scheme,), ignored=ignored)


def read_modelopt(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads NVIDIA ModelOpt, from config.json or from hf_quant_config.json.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    fields = section(fields, "quantization") or fields
    algorithm = fields.get("quant_algo")
    if algorithm == MIXED:
        layers = section(fields, "quantized_layers", prefix="quantization.") or {}
        schemes = tuple(_modelopt_layer(name, layer) for name, layer in layers.items())
        if not schemes:
            raise QuantizationError("quantized_layers", dict(layers), "an object with layers")
    else:
        schemes = (_modelopt_scheme("quant_algo", algorithm, fields),)
    excluded = "exclude_modules" if "exclude_modules" in fields else "ignore"
    return QuantizationConfig(
        method="modelopt",
        schemes=schemes,
        ignored=read_names(fields, excluded),
    )


def _modelopt_layer(name: str, layer: object) -> WeightScheme:
    if not isinstance(layer, dict):
        raise QuantizationError(f"quantized_layers.{name}", layer, "an object")
    require_pattern("quantized_layers", name)
    path = f"quantized_layers.{name}.quant_algo"
    # All experts of a layer have one entry, under the name of the module that holds them.
    targets = name, f"{name}.*"
    return replace(_modelopt_scheme(path, layer.get("quant_algo"), layer), targets=targets)


def _modelopt_scheme(path: str, algorithm: object, fields: Mapping[str, Any]) -> WeightScheme:
    scheme = MODELOPT_SCHEMES.get(algorithm) if isinstance(algorithm, str) else None
    if scheme is None:
        wanted = f"one of {', '.join(MODELOPT_SCHEMES)} or {MIXED}"
        raise QuantizationError(path, algorithm, wanted)
    size = fields.get("group_size")
    is_given = size is not None and scheme.group_size is not None
    if is_given and (type(size) is not int or size != scheme.group_size):
        raise QuantizationError("group_size", size, f"{scheme.group_size} for {algorithm}")
    return scheme
