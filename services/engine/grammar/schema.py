"""Checks JSON schemas: each keyword must be enforced or an annotation.

llguidance ignores unknown keywords at any depth; outputs would break rules that callers rely on.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from services.engine.errors import InvalidRequestError

MAX_DEPTH = 120
"""Objects and arrays inside each other in a schema; llguidance's JSON parser takes 127."""
_DEPTH_LIMIT = f"the limit is {MAX_DEPTH}"

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Values of `format` that are enforced."""

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
ANNOTATIONS = frozenset(
    {
        "$comment", "default", "deprecated", "description", "discriminator", "enumNames", "example",
        "examples", "externalDocs", "propertyOrdering", "readOnly", "title", "writeOnly", "xml",
    }
)  # fmt: skip
"""Keywords that allow and forbid nothing. So does any keyword that begins with "x-"."""
_IDENTITY = frozenset({"$id", "$schema", "id"})
_HINTS = {
    "nullable": 'use "type": [..., "null"]',
    "contentEncoding": "use pattern or format",
    "contentMediaType": "use pattern or format",
    "dependencies": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "if": "use anyOf",
}


def read_schema(text: str) -> dict[str, Any]:
    """Returns a schema whose keywords are all enforced or annotations.

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
    _check(schema)
    return schema


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


def _check(root: dict[str, Any]) -> None:
    """Raises InvalidRequestError unless every schema inside `root` is understood."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue  # llguidance refuses what is neither an object nor a boolean
        seen.add(id(schema))
        for keyword in schema:
            _check_keyword(schema, keyword)
        waiting += _inside(schema)
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(_resolve(root, reference))  # it may be where no schema is looked for


def is_annotation(keyword: str) -> bool:
    """Whether a keyword allows and forbids nothing."""
    return keyword in ANNOTATIONS or keyword.startswith("x-") or keyword in _IDENTITY


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
