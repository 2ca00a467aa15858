"""Reads the values of arguments that are written without the quotes of JSON's strings."""

import json
from typing import Any, NoReturn

_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def schema_of(schema: Any, key: str) -> Any:
    """Returns the schema of one argument; an empty one if the tool's schema has none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key, {}) if isinstance(properties, dict) else {}


def json_of(written: str, schema: Any) -> str:
    """Returns a value as JSON: strings are written bare, all else as JSON or as Python's constants.

    What could be either is a string where its schema has strings and not the other kind.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return json.dumps(written, ensure_ascii=False)
    text = written.strip()
    if kinds & {"boolean", "null"}:
        text = _PYTHON_NAMES.get(text, text)
    try:
        kind = _KINDS[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    is_string = "string" in kinds and kind not in kinds
    return json.dumps(written, ensure_ascii=False) if is_string else text


def _kinds(schema: Any) -> set[str]:
    """Returns the kinds of values that a schema names; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    kinds = {str(each) for each in (named if isinstance(named, list) else [named])}
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice)
    return kinds | {"integer"} if "number" in kinds else kinds


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are Python's, not JSON's
