"""Reads config.json's quantization_config: the format of a checkpoint's weights. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.config_sections.fields import shown

MAX_IGNORED_NAMES = 2**16
MAX_BLOCK = 2**16
"""Most rows or columns of weights that share a scale."""

QUANT_METHODS = ("fp8", "compressed-tensors", "mxfp4")


class QuantizationError(ValueError):
    """A field is ill-typed or names an unsupported format; the message says which and why."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__(f"quantization_config.{name} is {shown(value)}; it must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The format of quantised weights."""

    method: str
    """One of QUANT_METHODS."""
    block_size: tuple[int, int] | None = None
    """Rows and columns of weights that share a scale; None: a row or a whole tensor does."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of their names, or regular expressions after `re:`."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "QuantizationConfig":
        """Reads the object as Hugging Face checkpoints write it.

        Raises:
            QuantizationError: a field is ill-typed or names an unsupported format.
        """
        method = fields.get("quant_method")
        if method == "fp8":
            return _fp8(fields)
        if method == "compressed-tensors":
            return _compressed_tensors(fields)
        if method == "mxfp4":
            return cls(method=method, ignored=_names(fields, "modules_to_not_convert"))
        raise QuantizationError("quant_method", method, f"one of {', '.join(QUANT_METHODS)}")

    def ignores(self, module: str) -> bool:
        """Returns whether a module, by its name in the checkpoint, is not quantised."""
        return any(
            re.match(pattern.removeprefix("re:"), module)
            if pattern.startswith("re:")
            else f".{pattern}." in f".{module}."
            for pattern in self.ignored
        )


def _fp8(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the form of DeepSeek and Qwen (blocks) and of older tools (one scale per tensor)."""
    if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise QuantizationError("fmt", fields["fmt"], "e4m3")
    is_old = fields.get("modules_to_not_convert") is None
    return QuantizationConfig(
        method="fp8",
        block_size=_block_size(fields, "weight_block_size"),
        ignored=_names(fields, "ignored_layers" if is_old else "modules_to_not_convert"),
    )


def _compressed_tensors(fields: Mapping[str, Any]) -> QuantizationConfig:
    """Reads the form of the compressed-tensors library, 8-bit floats only."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise QuantizationError("config_groups", groups, "an object with at least one group")
    _check_cache_scheme(fields.get("kv_cache_scheme"))
    block_sizes = {_group_block_size(name, group) for name, group in groups.items()}
    if len(block_sizes) > 1:
        raise QuantizationError("config_groups", groups, "groups that scale weights alike")
    return QuantizationConfig(
        method="compressed-tensors",
        block_size=block_sizes.pop(),
        ignored=_names(fields, "ignore"),
    )


def _check_cache_scheme(scheme: object) -> None:
    """Checks the cache format that the weights were made for: 8-bit floats or none.

    Whether keys and values are cached so is the engine's setting, not the checkpoint's.
    """
    if scheme is None:
        return
    stored = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else scheme
    if stored != ("float", 8):
        raise QuantizationError("kv_cache_scheme", scheme, "absent, or of type float with 8 bits")


def _group_block_size(name: str, group: object) -> tuple[int, int] | None:
    """Checks one group of layers and returns the size of its blocks; None without blocks."""
    prefix = f"config_groups.{name}.weights"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise QuantizationError(prefix, weights, "an object")
    stored = weights.get("type"), weights.get("num_bits")
    if stored != ("float", 8):
        raise QuantizationError(f"{prefix}.type and num_bits", stored, "('float', 8)")
    strategy = weights.get("strategy")
    if strategy == "block":
        size = _block_size(weights, "block_structure")
        if size is None:
            raise QuantizationError(f"{prefix}.block_structure", None, "two positive integers")
        return size
    if strategy not in ("tensor", "channel"):
        raise QuantizationError(f"{prefix}.strategy", strategy, "tensor, channel or block")
    return None


def _block_size(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    size = fields.get(name)
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(count) is int and 0 < count <= MAX_BLOCK for count in size):
        raise QuantizationError(name, size, f"two positive integers up to {MAX_BLOCK}")
    return size[0], size[1]


def _names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = fields.get(name)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise QuantizationError(name, names, "a list of module names")
    if len(names) > MAX_IGNORED_NAMES:
        raise QuantizationError(name, names, f"at most {MAX_IGNORED_NAMES} names")
    for entry in names:
        try:
            re.compile(entry.removeprefix("re:"))
        except re.error as error:
            raise QuantizationError(name, entry, f"a regular expression: {error}") from error
    return tuple(names)
