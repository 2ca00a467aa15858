"""Reads the quantization_config of AWQ, GPTQ and AutoRound: packed integers with groups."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.quantization.config import QuantizationConfig, QuantizationError, WeightScheme
from models.quantization.fields import (
    read_bits,
    read_choice,
    read_flag,
    read_group_size,
    read_names,
    require_expression,
    section,
)

GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Checkpoint format -> what is added to stored zero points. The old one stores them less one."""

_ROUND_PACKINGS = {
    "auto": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round:auto_gptq": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round:gptq": ("gptq", GPTQ_FORMATS["gptq"]),
    "auto_round": ("gptq", GPTQ_FORMATS["gptq_v2"]),
    "auto_round:gptqmodel": ("gptq", GPTQ_FORMATS["gptq_v2"]),
    "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}
"""packing_format of AutoRound -> the tool that stores weights so, and what is added to zero points.
Source: github.com/intel/auto-round, auto_round/inference/backend.py, GPTQ_FORMAT and beside it."""
_ROUND_KERNELS = ("exllamav2", "triton")
"""Kernels whose names old releases of AutoRound append to the packing; they share its layout."""
_PLAIN_BITS = (16, 32)
"""AutoRound's bits of what is not quantised."""
_SPECIAL = frozenset("*+?^$()[]{}|\\")
"""Characters by which AutoRound knows a regular expression."""


def read_awq(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads AWQ, in the packing of its gemm version.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    # GPTQModel writes the latter two.
    for name in ("version", "checkpoint_format", "format"):
        version = fields.get(name, "gemm")
        is_gemm = isinstance(version, str) and version.lower() in ("gemm", "")
        if version is not None and not is_gemm:
            raise QuantizationError(name, version, "gemm")
    if read_bits(fields, "w_bit" if "w_bit" in fields else "bits") != 4:
        raise QuantizationError("bits", fields.get("bits"), "4")
    scheme = WeightScheme(
        kind="int4",
        group_size=read_group_size(
            fields, "q_group_size" if "q_group_size" in fields else "group_size"
        ),
        is_symmetric=not read_flag(fields, "zero_point", default=True),
    )
    return QuantizationConfig(
        method="awq", schemes=(scheme,), ignored=read_names(fields, "modules_to_not_convert")
    )


def read_gptq(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads GPTQ of either convention of zero points, with its overrides of single modules.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    stored_format = _gptq_format(fields)
    # Tools write and read the old convention where they do not name one.
    scheme = WeightScheme(kind="int4", zero_offset=GPTQ_FORMATS[stored_format or "gptq"])
    scheme = _override(scheme, {"desc_act": False, "sym": True, **fields}, "")
    ignored = list(read_names(fields, "modules_in_block_to_not_quantize"))
    schemes = []
    for pattern, changes in (section(fields, "dynamic") or {}).items():
        expression = re.sub(r"^[+-]:", "", pattern)
        require_expression("dynamic", expression)
        if pattern.startswith("-:"):
            ignored.append(f"re:{expression}")
            continue
        if not isinstance(changes, dict):
            raise QuantizationError(f"dynamic[{pattern!r}]", changes, "an object")
        changed = _override(scheme, {**fields, **changes}, f"dynamic[{pattern!r}].")
        schemes.append(replace(changed, targets=(f"re:{expression}",)))
    schemes.append(scheme)
    return QuantizationConfig(
        method="gptq",
        schemes=tuple(schemes),
        ignored=tuple(ignored),
        assumes_zero_points=stored_format is None
        and not all(each.is_symmetric for each in schemes),
    )


def read_auto_round(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads AutoRound's own form, which stores integers as GPTQ or AWQ do.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    method, zero_offset = _round_packing(fields)
    read_choice(fields, "data_type", ("int",))
    if fields.get("act_bits") not in (None, *_PLAIN_BITS):
        raise QuantizationError("act_bits", fields["act_bits"], "16: activations are not rounded")
    scheme = _override(WeightScheme(kind="int4", zero_offset=zero_offset), fields, "")
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
        changed = _override(scheme, {**fields, **changes}, f"{path}.")
        schemes.append(replace(changed, targets=(target,)))
    schemes.append(scheme)
    if method == "awq" and any(each.kind != "int4" for each in schemes):
        raise QuantizationError("bits", fields.get("bits"), "4 in every layer in AWQ's packing")
    return QuantizationConfig(method=method, schemes=tuple(schemes), ignored=tuple(ignored))


def _round_packing(fields: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the tool in whose packing AutoRound stores weights, and what is added to zeros.

    Releases before 0.5 name it in `backend`.
    """
    name = "packing_format" if fields.get("packing_format") not in (None, "") else "backend"
    stored = fields.get(name)
    stored = "auto" if stored is None or stored == "" else stored
    words = stored.split(":") if isinstance(stored, str) else []
    words[:1] = ["auto_round" if word == "autoround" else word for word in words[:1]]
    packing = ":".join(word for word in words if word not in _ROUND_KERNELS)
    if packing not in _ROUND_PACKINGS:
        raise QuantizationError(name, stored, f"one of {', '.join(_ROUND_PACKINGS)}")
    return _ROUND_PACKINGS[packing]


def _gptq_format(fields: Mapping[str, Any]) -> str | None:
    """Returns the convention of zero points, from either of two fields; None without both."""
    if read_flag(fields, "is_marlin_format", default=False):
        raise QuantizationError("is_marlin_format", fields["is_marlin_format"], "absent or false")
    first, other = (
        read_choice(fields, name, tuple(GPTQ_FORMATS)) for name in ("checkpoint_format", "format")
    )
    if first is not None and other not in (None, first):
        raise QuantizationError("format", other, f"{first}, as checkpoint_format is")
    return first or other


def _override(scheme: WeightScheme, fields: Mapping[str, Any], prefix: str) -> WeightScheme:
    """Returns the scheme with the settings of `fields`."""
    return replace(
        scheme,
        kind="int4" if read_bits(fields, "bits", prefix=prefix) == 4 else "int8",
        group_size=read_group_size(fields, "group_size", prefix=prefix),
        is_symmetric=read_flag(fields, "sym", default=True, prefix=prefix),
        has_order=read_flag(fields, "desc_act", default=False, prefix=prefix),
    )
