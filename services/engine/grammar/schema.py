"""Checks JSON schemas: each keyword must be enforced, or have no effect.

llguidance ignores unknown keywords at any depth; outputs would break rules that callers rely on.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import unquote

from services.engine.errors import InvalidRequestError
from services.engine.grammar.formats import FORMATS
from services.engine.grammar.inert_keywords import is_annotation, simplify

MAX_DEPTH = 120
"""Objects and arrays inside each other in a schema; llguidance's JSON parser takes 127."""
_DEPTH_LIMIT = f"the limit is {MAX_DEPTH}"

_SUBSCHEMA = frozenset({"additionalItems", "additionalProperties"})
_SUBSCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED_SUBSCHEMAS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
ENFORCED = (
    frozenset(
        {
            "$anchor", "$id", "$ref", "$schema", "const", "enum", "exclusiveMaximum",
            "exclusiveMinimum", "format", "id", "items", "maxItems", "maxLength", "maxProperties",
            "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern",
            "required", "type",
        }
    )
    | _SUBSCHEMA
    | _SUBSCHEMAS
    | _NAMED_SUBSCHEMAS
)  # fmt: skip
"""Keywords that outputs follow, or that other keywords refer to."""
_HINTS = {
    "nullable": 'use "type": [..., "null"]',
    "propertyNames": "use patternProperties",
    "contentEncoding": "use pattern or format",
    "dependencies": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "if": "use anyOf",
}


def read_schema(text: str) -> dict[str, Any]:
    """Returns a schema whose keywords are all enforced or annotations, without inert ones.

    Raises:
        InvalidRequestError: it is no JSON object, too deep, or has a keyword or a format that is
            not enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequestError(f"json_schema nests too deep; {_DEPTH_LIMIT}") from None
    except ValueError as error:
        raise InvalidRequestError(f"json_schema cannot be read: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError("json_schema is not an object; {} accepts any JSON")
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise InvalidRequestError(f"json_schema nests {depth} levels deep; {_DEPTH_LIMIT}")
    for each in schemas_of(schema):
        simplify(each, partial(_resolve, schema))
        for keyword in each:
            _check_keyword(each, keyword)
    return schema


def schemas_of(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a schema and all inside it; those inside one are found after it was changed."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue  # llguidance refuses what is neither an object nor a boolean
        seen.add(id(schema))
        yield schema
        waiting += _inside(schema)
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(_resolve(root, reference))  # it may be where no schema is looked for


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    """Returns the nesting depth of objects and arrays."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return depth


def _check_keyword(schema: dict[str, Any], keyword: str) -> None:
    if keyword not in ENFORCED and not is_annotation(keyword):
        hint = f"; {_HINTS[keyword]}" if keyword in _HINTS else ""
        raise InvalidRequestError(f"json_schema has {keyword!r}, which is not enforced{hint}")
    value = schema[keyword]
    if keyword == "format" and isinstance(value, str) and value not in FORMATS:
        raise InvalidRequestError(
            f"json_schema has format {value!r}, which is not enforced; enforced are "
            f"{', '.join(sorted(FORMATS))}"
        )
    if keyword == "additionalItems" and "prefixItems" in schema:
        raise InvalidRequestError("json_schema has additionalItems beside prefixItems; use items")


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the schemas among the values of a schema's keywords."""
    for keyword, value in schema.items():
        if keyword in _SUBSCHEMA:
            yield value
        elif keyword == "items":
            yield from value if isinstance(value, list) else (value,)
        elif keyword in _SUBSCHEMAS and isinstance(value, list):
            yield from value
        elif keyword in _NAMED_SUBSCHEMAS and isinstance(value, dict):
            yield from value.values()


def _resolve(root: Any, reference: str) -> Any:
    """Returns the target of a reference's JSON pointer, if any."""
    _, _, pointer = reference.partition("#/")
    place = root
    for part in unquote(pointer).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(name)
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place
