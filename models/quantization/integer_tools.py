"""Reads the quantization_config of AWQ and GPTQ: packed integers with groups."""

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
    has_zeros = read_flag(fields, "zero_point", default=True)
    # Quark writes it, and without zero points its integers have a sign.
    is_quark = read_choice(fields, "pack_method", ("reorder",)) is not None
    if is_quark and not has_zeros:
        raise QuantizationError("zero_point", has_zeros, "true with pack_method")
    scheme = WeightScheme(
        kind="int4",
        group_size=read_group_size(
            fields, "q_group_size" if "q_group_size" in fields else "group_size"
        ),
        is_symmetric=not has_zeros,
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
    scheme = with_settings(scheme, {"desc_act": False, "sym": True, **fields}, "")
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
        changed = with_settings(scheme, {**fields, **changes}, f"dynamic[{pattern!r}].")
        schemes.append(replace(changed, targets=(f"re:{expression}",)))
    schemes.append(scheme)
    return QuantizationConfig(
        method="gptq",
        schemes=tuple(schemes),
        ignored=tuple(ignored),
        assumes_zero_points=stored_format is None
        and not all(each.is_symmetric for each in schemes),
    )


def with_settings(scheme: WeightScheme, fields: Mapping[str, Any], prefix: str) -> WeightScheme:
    """Returns a scheme of integers with the settings of `fields`, as GPTQ and AutoRound write them.

    Raises:
        QuantizationError: a field is ill-typed or has an unsupported value.
    """
    return replace(
        scheme,
        kind="int4" if read_bits(fields, "bits", prefix=prefix) == 4 else "int8",
        group_size=read_group_size(fields, "group_size", prefix=prefix),
        is_symmetric=read_flag(fields, "sym", default=True, prefix=prefix),
        has_order=read_flag(fields, "desc_act", default=False, prefix=prefix),
    )


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
