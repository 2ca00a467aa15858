"""Reads the quantization_config of AutoRound, which stores weights as other tools do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.quantization.compressed_tensors import MXFP4_GROUP, MXFP8_BLOCK, NVFP4_GROUP
from models.quantization.config import (
    Activations,
    QuantizationConfig,
    QuantizationError,
    WeightScheme,
)
from models.quantization.fields import (
    read_bits,
    read_choice,
    read_group_size,
    read_pair,
    require_expression,
    section,
)
from models.quantization.integer_tools import GPTQ_FORMATS, with_settings

PACKINGS = {
    "auto": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round:auto_gptq": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round:gptq": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round": ("gptq", GPTQ_FORMATS["gptq_v2"]),
    "auto_round:gptqmodel": ("gptq", GPTQ_FORMATS["gptq_v2"]),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
"""packing_format of integers -> the tool that stores weights so, and what is added to zero points.
Source: github.com/intel/auto-round, auto_round/inference/backend.py, GPTQ_FORMAT and beside it."""
DATA_TYPES = ("int", "fp", "mx_fp", "mx_fp_rceil", "nv_fp", "nv_fp4_with_static_gs")
"""Those of floats are stored in the layout of compressed-tensors, whatever the packing_format.
Source: github.com/intel/auto-round, auto_round/export/export_to_autoround."""
_KERNELS = ("exllamav2", "triton")
"""Kernels whose names old releases append to the packing; they share its layout."""
_PLAIN_BITS = (16, 32)
"""Bits of what is not quantised."""
_ACTIVATIONS: dict[object, Activations] = {4: "fp4", 8: "fp8"}
"""act_bits of floats; others: activations are not rounded."""
_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters by which AutoRound knows a regular expression."""


def read_auto_round(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the formats of all layers.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    method, zero_offset = "auto-round", 0
    is_integer = read_choice(fields, "data_type", DATA_TYPES) in (None, "int")
    if is_integer:
        method, zero_offset = _packing(fields)
    integers = WeightScheme(kind="int4", zero_offset=zero_offset) if is_integer else None
    ignored = []
    schemes = []
    for name, changes in (section(fields, "extra_config") or {}).items():
        path = f"extra_config[{name!r}]"
        if not isinstance(changes, dict):
            raise QuantizationError(path, changes, "an object")
        target = name
        if _SPECIAL & set(name):
            require_expression(path, name)
            target = f"re:.*(?:{name})"
        if changes.get("bits") in _PLAIN_BITS:
            ignored.append(target)
            continue
        changed = _scheme({**fields, **changes}, integers, f"{path}.")
        schemes.append(replace(changed, targets=(target,)))
    schemes.append(_scheme(fields, integers, ""))
    if method == "awq" and any(each.kind == "int8" for each in schemes):
        raise QuantizationError("bits", fields.get("bits"), "4 in every layer in AWQ's packing")
    return QuantizationConfig(method=method, schemes=tuple(schemes), ignored=tuple(ignored))


def _scheme(fields: Mapping[str, Any], integers: WeightScheme | None, prefix: str) -> WeightScheme:
    """Returns the format of a layer; integers: what all layers of integers share."""
    data_type = read_choice(fields, "data_type", DATA_TYPES, prefix=prefix)
    if data_type not in (None, "int"):
        return _float_scheme(fields, data_type, prefix)
    if integers is None:
        raise QuantizationError(f"{prefix}data_type", data_type, "that of floats, as for others")
    if fields.get("act_bits") not in (None, *_PLAIN_BITS):
        wanted = "16: activations are not rounded"
        raise QuantizationError(f"{prefix}act_bits", fields["act_bits"], wanted)
    return with_settings(integers, fields, prefix)


def _float_scheme(fields: Mapping[str, Any], data_type: str | None, prefix: str) -> WeightScheme:
    """Returns the format of a layer of floats of 4 or 8 bits."""
    read_choice(fields, "fmt", ("e4m3",), prefix=prefix)
    bits = read_bits(fields, "bits", prefix=prefix)
    activations = _ACTIVATIONS.get(fields.get("act_bits"), "model")
    if data_type == "fp" and bits == 8:
        # -1: a row has a scale; 0: the whole weight.
        block = None if fields.get("group_size") in (-1, 0) else read_pair(fields, "group_size")
        return WeightScheme(kind="fp8", block_size=block, activations=activations)
    group = read_group_size(fields, "group_size", prefix=prefix)
    is_mx = data_type in ("mx_fp", "mx_fp_rceil")
    if data_type == "fp" or (bits == 8 and not is_mx):
        raise QuantizationError(f"{prefix}bits", bits, f"another for {data_type}")
    size = MXFP4_GROUP if is_mx else NVFP4_GROUP
    if group != size:
        raise QuantizationError(f"{prefix}group_size", group, f"{size} for {data_type}")
    if bits == 8:
        return WeightScheme(kind="fp8", block_size=MXFP8_BLOCK, activations=activations)
    return WeightScheme(
        kind="mxfp4" if is_mx else "nvfp4", group_size=size, activations=activations
    )


def _packing(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the tool in whose packing integers are stored, and what is added to zero points.

    Releases before 0.5 name it in `backend`.
    """
    name = "packing_format" if fields.get("packing_format") not in (None, "") else "backend"
    stored = fields.get(name)
    stored = "auto" if stored is None or stored == "" else stored
    words = stored.split(":") if isinstance(stored, str) else []
    words[:1] = ["auto_round" if word == "autoround" else word for word in words[:1]]
    packing = ":".join(word for word in words if word not in _KERNELS)
    if packing not in PACKINGS:
        raise QuantizationError(name, stored, f"one of {', '.join(PACKINGS)}")
    return PACKINGS[packing]
