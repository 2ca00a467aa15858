"""Reads the quantization_config of the compressed-tensors library (llm-compressor)."""

from collections.abc import Mapping
from typing import Any, TypeVar

from models.quantization.config import (
    Activations,
    QuantizationConfig,
    QuantizationError,
    WeightKind,
    WeightScheme,
)
from models.quantization.fields import (
    read_choice,
    read_flag,
    read_group_size,
    read_names,
    read_pair,
    section,
)

FORMATS = (
    "dense",
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
NVFP4_GROUP, MXFP4_GROUP = 16, 32
MXFP8_BLOCK = 1, 32
"""Rows and columns of an FP8 weight that share an exponent."""
_ACTIVATIONS: dict[tuple[object, object], Activations] = {
    ("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8"
}  # fmt: skip
"""Type and bits of input_activations."""
_Value = TypeVar("_Value")
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""Name of an actorder -> whether each column names its group."""


def read_compressed_tensors(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads all groups of modules.

    Raises:
        QuantizationError: a field is ill-typed or names an unsupported format.
    """
    _refuse_unsupported(fields)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise QuantizationError("config_groups", groups, "an object with at least one group")
    # Groups without weights round what attention takes.
    have_weights = {
        name: group
        for name, group in groups.items()
        if not isinstance(group, dict) or group.get("weights") is not None
    }
    schemes = (
        _scheme(f"config_groups.{name}.", group) for name, group in (have_weights or groups).items()
    )
    return QuantizationConfig(
        method="compressed-tensors",
        schemes=tuple(schemes),
        ignored=read_names(fields, "ignore"),
    )


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raises QuantizationError where ignoring a field would give wrong output."""
    read_choice(fields, "format", FORMATS)
    sparsity = section(fields, "sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        raise QuantizationError("sparsity_config", dict(sparsity), "absent or dense")
    transform = section(fields, "transform_config")
    if transform is not None and transform.get("config_groups"):
        raise QuantizationError("transform_config", dict(transform), "absent or empty")


def _scheme(prefix: str, group: object) -> WeightScheme:
    """Reads one group of modules."""
    if not isinstance(group, dict):
        raise QuantizationError(prefix.removesuffix("."), group, "an object")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise QuantizationError(f"{prefix}weights", weights, "an object")
    activations = _activations(prefix, group.get("input_activations"))
    targets = read_names(group, "targets", prefix=prefix)
    prefix += "weights."
    strategy = weights.get("strategy")
    kind = _kind(prefix, weights)
    if kind == "fp8":
        return WeightScheme(
            kind=kind,
            block_size=_fp8_blocks(prefix, weights, strategy),
            activations=activations,
            targets=targets,
        )
    if strategy not in ("tensor", "channel", "group", "tensor_group"):
        raise QuantizationError(f"{prefix}strategy", strategy, "tensor, channel or group")
    is_grouped = strategy in ("group", "tensor_group")
    return WeightScheme(
        kind=kind,
        group_size=read_group_size(weights, "group_size", prefix=prefix) if is_grouped else None,
        is_symmetric=read_flag(weights, "symmetric", default=True, prefix=prefix),
        has_order=_has_order(prefix, weights.get("actorder")),
        activations=activations,
        targets=targets,
    )


def _has_order(prefix: str, order: object) -> bool:
    """Returns whether columns name their groups; absent: they do not."""
    if order is None or isinstance(order, bool):
        return bool(order)
    # Older releases write names in capitals.
    name = order.lower() if isinstance(order, str) else None
    if name not in _ORDERS:
        raise QuantizationError(f"{prefix}actorder", order, f"one of {', '.join(_ORDERS)}")
    return _ORDERS[name]


def _kind(prefix: str, weights: Mapping[str, Any]) -> WeightKind:
    stored = weights.get("type"), weights.get("num_bits")
    kinds: dict[tuple[object, object], WeightKind] = {
        ("float", 8): "fp8", ("int", 4): "int4", ("int", 8): "int8"
    }  # fmt: skip
    kind = _value_of(kinds, stored)
    if kind is not None:
        return kind
    if stored == ("float", 4):
        size = weights.get("group_size")
        if type(size) is not int or size not in (NVFP4_GROUP, MXFP4_GROUP):
            wanted = f"{NVFP4_GROUP} (NVFP4) or {MXFP4_GROUP} (MXFP4)"
            raise QuantizationError(f"{prefix}group_size", size, wanted)
        return "nvfp4" if size == NVFP4_GROUP else "mxfp4"
    wanted = "('float', 8), ('float', 4), ('int', 4) or ('int', 8)"
    raise QuantizationError(f"{prefix}type and num_bits", stored, wanted)


def _fp8_blocks(
    prefix: str, weights: Mapping[str, Any], strategy: object
) -> tuple[int, int] | None:
    """Returns the size of blocks; a group is a block of one row. None without blocks."""
    if strategy == "block":
        size = read_pair(weights, "block_structure")
        if size is None:
            raise QuantizationError(f"{prefix}block_structure", None, "two positive integers")
        return size
    if strategy == "group":
        columns = read_group_size(weights, "group_size", prefix=prefix)
        return None if columns is None else (1, columns)
    if strategy not in ("tensor", "channel"):
        raise QuantizationError(f"{prefix}strategy", strategy, "tensor, channel, group or block")
    return None


def _activations(prefix: str, scheme: object) -> Activations:
    """Returns what the tool rounds activations to."""
    if scheme is None:
        return "model"
    name = f"{prefix}input_activations"
    if not isinstance(scheme, dict):
        raise QuantizationError(name, scheme, "an object")
    stored = scheme.get("type"), scheme.get("num_bits")
    activations = _value_of(_ACTIVATIONS, stored)
    if activations is None:
        wanted = f"absent or one of {', '.join(map(str, _ACTIVATIONS))}"
        raise QuantizationError(f"{name}.type and num_bits", stored, wanted)
    return activations


def _value_of(
    choices: Mapping[tuple[object, object], _Value], key: tuple[object, object]
) -> _Value | None:
    """Returns the value of a type and bits, which may be any JSON; None if absent."""
    is_counted = type(key[1]) is int  # not 8.0
    return next((value for each, value in choices.items() if is_counted and each == key), None)
