"""Reads the quantization_config of AMD Quark: floats of 4 and 8 bits, and integers of 4.

Source of the layouts: amd-quark 0.13, quark/torch/utils/pack.py and
quark/torch/export/nn/modules/realquantizer.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.quantization.compressed_tensors import MXFP4_GROUP
from models.quantization.config import (
    Activations,
    QuantizationConfig,
    QuantizationError,
    WeightScheme,
)
from models.quantization.fields import (
    read_choice,
    read_flag,
    read_group_size,
    read_names,
    require_pattern,
    section,
)

PACK_METHODS = ("reorder", "order")
"""Orders of the columns in a word of integers: that of AWQ, and none."""
_ACTIVATIONS: dict[str, Activations] = {"int8": "int8", "fp8_e4m3": "fp8"}
"""Dtype of input_tensors beside weights of integers; absent: activations are not rounded."""


def read_quark(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the formats of all layers.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    _refuse_rotated_inputs(fields.get("algo_config"))
    export = section(fields, "export") or {}
    pack_method = read_choice(export, "pack_method", PACK_METHODS, prefix="export.")
    ignored = read_names(fields, "exclude")
    schemes = []
    for name, layer in (section(fields, "layer_quant_config") or {}).items():
        require_pattern("layer_quant_config", name)
        if _quark_weight(layer) is None:
            ignored += (name,)
            continue
        scheme = _quark_scheme(f"layer_quant_config.{name}.", layer)
        schemes.append(replace(scheme, targets=(name,)))
    others = fields.get("global_quant_config")
    if _quark_weight(others) is not None or not schemes:
        schemes.append(_quark_scheme("global_quant_config.", others))
    if pack_method is None and any(each.kind == "int4" for each in schemes):
        raise QuantizationError("export.pack_method", None, f"one of {', '.join(PACK_METHODS)}")
    is_shuffled = pack_method != "order"
    return QuantizationConfig(
        method="quark",
        schemes=tuple(replace(each, is_shuffled=is_shuffled) for each in schemes),
        ignored=ignored,
    )


def _refuse_rotated_inputs(algorithms: object) -> None:
    """Raises QuantizationError if layers take inputs that are rotated while the model runs."""
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        for name in ("r4", "online_r1_rotation"):
            if isinstance(each, dict) and each.get(name):
                wanted = "absent or false: inputs of layers are not rotated"
                raise QuantizationError(f"algo_config.{name}", each[name], wanted)


def _quark_weight(layer: object) -> object:
    return layer.get("weight") if isinstance(layer, dict) else None


def _quark_scheme(prefix: str, layer: object) -> WeightScheme:
    weight = _quark_weight(layer)
    if not isinstance(weight, dict):
        raise QuantizationError(f"{prefix}weight", weight, "an object")
    stored = weight.get("dtype"), weight.get("qscheme")
    if stored == ("fp4", "per_group"):
        size = weight.get("group_size")
        if type(size) is not int or size != MXFP4_GROUP:
            raise QuantizationError(f"{prefix}weight.group_size", size, str(MXFP4_GROUP))
        return WeightScheme(kind="mxfp4", group_size=MXFP4_GROUP, activations="fp4")
    if stored in (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel")):
        return WeightScheme(kind="fp8", activations="fp8")
    if stored == ("fp8_e4m3", "per_group"):
        columns = read_group_size(weight, "group_size", prefix=f"{prefix}weight.")
        block = None if columns is None else (1, columns)
        return WeightScheme(kind="fp8", block_size=block, activations="fp8")
    if stored in (("int4", "per_group"), ("uint4", "per_group")):
        return _integer_scheme(prefix, layer, weight)
    wanted = (
        "fp4, int4 or uint4 with per_group, or fp8_e4m3 with per_tensor, per_channel or per_group"
    )
    raise QuantizationError(f"{prefix}weight.dtype and qscheme", stored, wanted)


def _integer_scheme(prefix: str, layer: object, weight: Mapping[str, Any]) -> WeightScheme:
    """Returns the form of integers of 4 bits."""
    activations: Activations = "model"
    inputs = section(layer, "input_tensors", prefix=prefix) if isinstance(layer, dict) else None
    if inputs is not None:
        path = f"{prefix}input_tensors."
        rounded = read_choice(inputs, "dtype", tuple(_ACTIVATIONS), prefix=path)
        activations = "model" if rounded is None else _ACTIVATIONS[rounded]
    path = f"{prefix}weight."
    if weight.get("ch_axis") not in (1, -1, None):
        raise QuantizationError(f"{path}ch_axis", weight["ch_axis"], "1 or -1")
    read_choice(weight, "zero_point_type", ("int32",), prefix=path)
    is_signed = weight["dtype"] == "int4"
    return WeightScheme(
        kind="int4",
        group_size=read_group_size(weight, "group_size", prefix=path),
        is_symmetric=read_flag(weight, "symmetric", default=is_signed, prefix=path),
        is_signed=is_signed,
        activations=activations,
    )
