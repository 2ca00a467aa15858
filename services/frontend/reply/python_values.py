"""Reads values that are written as Python writes them."""

import ast
import json
import math
import warnings
from typing import Any, NoReturn

_JSON_NAMES = {"true": True, "false": False, "null": None}


def json_of_python(written: str) -> str:
    """Returns a value as JSON: a literal of Python or JSON, or else its text as a string.

    Tuples and sets become lists; a part of a literal that JSON lacks becomes its text.
    """
    text = written.strip()
    try:
        # As grammars write values; Python lacks some of JSON's escapes.
        json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _json_of_literal(text)
    return text


def _json_of_literal(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            node = ast.parse(text, mode="eval").body
        value = _value(node)
        if not isinstance(value, _OtherText):
            return json.dumps(value, ensure_ascii=False)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass  # no expression, or one that is too long or too deep
    return json.dumps(text, ensure_ascii=False)


class _OtherText(str):
    """The text of an expression that JSON lacks."""

    __slots__ = ()


def _value(node: ast.expr) -> Any:
    """Returns the value of a literal; the text of anything else."""
    match node:
        case ast.Constant(str() | int() | None as value):
            return value
        case ast.Constant(float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.UnaryOp(ast.USub(), ast.Constant(float() as value)) if math.isfinite(value):
            return -value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_key(key): _value(value) for key, value in pairs if key is not None}
    return _OtherText(ast.unparse(node))


def _key(node: ast.expr) -> str:
    key = _value(node)
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise ValueError(digits)
    return float(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
