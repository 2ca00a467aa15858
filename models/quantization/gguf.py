"""The quantization_config that a GGUF file's config.json gets."""

from collections.abc import Mapping
from typing import Any

from models.quantization.config import (
    QuantizationConfig,
    QuantizationError,
    WeightKind,
    WeightScheme,
)

GROUP = 32
KINDS: dict[str, WeightKind] = {"Q4_0": "int4", "Q8_0": "int8"}
"""Types whose values are q * scale; Q4_1 adds a minimum that is no multiple of its scale."""


def read_gguf(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the types of a file that can stay packed."""
    types = fields.get("types")
    if not isinstance(types, list) or not types or any(each not in KINDS for each in types):
        raise QuantizationError("types", types, f"a list of {', '.join(KINDS)}")
    schemes = [WeightScheme(kind=KINDS[each], group_size=GROUP) for each in types]
    return QuantizationConfig(method="gguf", schemes=tuple(schemes))
