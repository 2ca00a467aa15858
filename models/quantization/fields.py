"""Reads single fields of a quantization_config, with their types checked."""

from collections.abc import Mapping
from typing import Any

from models.quantization.config import MAX_BLOCK, QuantizationError
from models.quantization.expressions import EXPRESSION, find_fault

MAX_NAMES = 2**16


def read_names(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> tuple[str, ...]:
    """Reads a list of names, some with `*`, and regular expressions after `re:`; absent: none.

    Raises:
        QuantizationError: it is no such list.
    """
    names = fields.get(name)
    if names is None:
        return ()
    path = prefix + name
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise QuantizationError(path, names, "a list of module names")
    if len(names) > MAX_NAMES:
        raise QuantizationError(path, names, f"at most {MAX_NAMES} names")
    for entry in names:
        require_pattern(path, entry)
    return tuple(names)


def require_pattern(name: str, pattern: str) -> None:
    """Raises QuantizationError if `pattern` has a text after `re:` that is no expression."""
    if pattern.startswith(EXPRESSION):
        require_expression(name, pattern.removeprefix(EXPRESSION))


def require_expression(name: str, expression: str) -> None:
    """Raises QuantizationError unless `expression` is a regular expression."""
    reason = find_fault(expression)
    if reason is not None:
        raise QuantizationError(name, expression, f"a regular expression: {reason}")


def read_pair(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Reads a block's rows and columns; None if they are absent.

    Raises:
        QuantizationError: they are not two positive integers.
    """
    size = fields.get(name)
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(count) is int and 0 < count <= MAX_BLOCK for count in size):
        raise QuantizationError(name, size, f"two positive integers up to {MAX_BLOCK}")
    return size[0], size[1]


def read_group_size(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> int | None:
    """Reads the columns that share a scale; None for -1, a whole row.

    Raises:
        QuantizationError: the field is absent or another value.
    """
    size = fields.get(name)
    if type(size) is not int or not (size == -1 or 0 < size <= MAX_BLOCK):
        raise QuantizationError(prefix + name, size, f"-1 or a positive integer up to {MAX_BLOCK}")
    return None if size == -1 else size


def read_flag(fields: Mapping[str, Any], name: str, *, default: bool, prefix: str = "") -> bool:
    """Reads a flag; absent or null: `default`.

    Raises:
        QuantizationError: it is not true or false.
    """
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise QuantizationError(prefix + name, value, "true or false")
    return value


def read_bits(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> int:
    """Reads the bits of packed integers.

    Raises:
        QuantizationError: there is no reader for that many.
    """
    bits = fields.get(name)
    if type(bits) is not int or bits not in (4, 8):
        raise QuantizationError(prefix + name, bits, "4 or 8")
    return bits


def read_choice(
    fields: Mapping[str, Any], name: str, choices: tuple[str, ...], *, prefix: str = ""
) -> str | None:
    """Reads a string out of a closed set; absent, null or empty: None.

    Raises:
        QuantizationError: it is something else.
    """
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or value not in choices:
        raise QuantizationError(prefix + name, value, f"one of {', '.join(choices)}")
    return value


def section(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> Mapping[str, Any] | None:
    """Reads an object; None if it is absent, null or empty.

    Raises:
        QuantizationError: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise QuantizationError(prefix + name, value, "an object")
    return value or None
