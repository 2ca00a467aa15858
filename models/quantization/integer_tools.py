"""Reads the quantization_config of AWQ and GPTQ: packed integers with groups."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.quantization.config import QuantizationConfig, QuantizationError, WeightScheme
from models.quantization.fields import (
    check_expression,
    read_bits,
    read_flag,
    read_group_size,
    read_names,
    section,
)

GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Checkpoint format -> what is added to stored zero points. The old one stores them less one."""


def read_awq(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads AWQ, in the packing of its gemm version.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    version = fields.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise QuantizationError("version", version, "gemm")
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
    stored = fields.get("checkpoint_format")
    if stored is not None and stored not in GPTQ_FORMATS:
        raise QuantizationError("checkpoint_format", stored, "gptq or gptq_v2")
    scheme = WeightScheme(kind="int4", zero_offset=GPTQ_FORMATS[stored or "gptq"])
    scheme = _override(scheme, {"desc_act": False, "sym": True, **fields}, "")
    ignored = list(read_names(fields, "modules_in_block_to_not_quantize"))
    schemes = []
    for pattern, changes in (section(fields, "dynamic") or {}).items():
        expression = re.sub(r"^[+-]:", "", pattern)
        check_expression("dynamic", expression)
        if pattern.startswith("-:"):
            ignored.append(f"re:{expression}")
            continue
        if not isinstance(changes, dict):
            raise QuantizationError(f"dynamic[{pattern!r}]", changes, "an object")
        changed = _override(scheme, {**fields, **changes}, f"dynamic[{pattern!r}].")
        schemes.append(replace(changed, targets=(f"re:{expression}",)))
    return QuantizationConfig(method="gptq", schemes=(*schemes, scheme), ignored=tuple(ignored))


def _override(scheme: WeightScheme, fields: Mapping[str, Any], prefix: str) -> WeightScheme:
    """Returns the scheme with the settings of `fields`."""
    return replace(
        scheme,
        kind="int4" if read_bits(fields, "bits", prefix=prefix) == 4 else "int8",
        group_size=read_group_size(fields, "group_size", prefix=prefix),
        is_symmetric=read_flag(fields, "sym", default=True, prefix=prefix),
        has_order=read_flag(fields, "desc_act", default=False, prefix=prefix),
    )
