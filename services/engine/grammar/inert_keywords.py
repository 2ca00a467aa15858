"""Removes keywords that have no effect from schemas, and replaces others by more common ones.

Generators write them: those of Pydantic, zod, schemars, OpenAPI and Protocol Buffers.
"""

import re
from collections.abc import Callable
from typing import Any

from services.engine.grammar.formats import ENCODINGS, FORMATS, FREE, FREE_ENCODINGS

ANNOTATIONS = frozenset(
    {
        "$comment", "$vocabulary", "contentMediaType",
        "contentSchema", "default", "defaultSnippets", "deprecated", "deprecationMessage",
        "description", "discriminator", "doNotSuggest", "enumDescriptions", "enumNames",
        "errorMessage", "example", "examples", "externalDocs", "markdownDescription",
        "markdownEnumDescriptions", "propertyOrder", "propertyOrdering", "readOnly", "title",
        "writeOnly", "xml",
    }
)  # fmt: skip
"""Keywords that allow and forbid nothing. So does any keyword that begins with "x-"."""
_IDENTITY = frozenset({"$id", "$schema", "id"})
_ANYTHING: tuple[Any, ...] = (True, {})
"""Schemas that any value follows."""

_ABSENT_AS_NULL = frozenset(
    {"$defs", "definitions", "enum", "items", "patternProperties", "properties", "required"}
)
"""Keywords whose empty lists and objects Go's generators write as null."""

Schema = dict[str, Any]


def is_annotation(keyword: str) -> bool:
    """Whether a keyword allows and forbids nothing."""
    return keyword in ANNOTATIONS or keyword.startswith("x-") or keyword in _IDENTITY


def simplify(schema: Schema, resolve: Callable[[str], Any]) -> None:
    """Removes a schema's keywords that have no effect, and replaces some by more common ones.

    Args:
        schema: is changed; the schemas inside it are not.
        resolve: returns the target of a reference.
    """
    nulls = {name for name in schema.keys() & _ABSENT_AS_NULL if schema[name] is None}
    for keyword in nulls | {name for name in schema if _has_no_effect(schema, name)}:
        del schema[keyword]
    if schema.get("not") == {}:
        schema.clear()
        schema["anyOf"] = []
    if schema.get("nullable") is True:
        del schema["nullable"]
        named = schema["type"]
        schema["type"] = [*(named if isinstance(named, list) else [named]), "null"]
        if isinstance(values := schema.get("enum"), list) and None not in values:
            schema["enum"] = [*values, None]
    if schema.get("contentEncoding") in ENCODINGS:
        encoding = schema.pop("contentEncoding")
        schema.setdefault("format", encoding)
    if "propertyNames" in schema:
        _move_names(schema, resolve)


def _has_no_effect(schema: Schema, keyword: str) -> bool:
    value = schema[keyword]
    match keyword:
        case "format":
            is_other = isinstance(value, str) and value not in FORMATS
            says_nothing = is_other and (value in FREE or "pattern" in schema)
            return says_nothing or _excludes_texts(schema)
        case "contentEncoding":
            return value in FREE_ENCODINGS or _excludes_texts(schema)
        case "nullable":
            return value is False or (value is True and "type" not in schema)
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "propertyNames":
            return value in _ANYTHING
        case (
            "unevaluatedItems" | "unevaluatedProperties" | "dependentRequired" | "dependentSchemas"
        ):
            return value in _ANYTHING
        case "$dynamicAnchor" | "$recursiveAnchor":
            return True  # a keyword that refers to it is refused
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if" | "then" | "else":
            return not ("if" in schema and schema.keys() & {"then", "else"})
    return False


def _excludes_texts(schema: Schema) -> bool:
    """Whether a schema's `type` lets no string follow it."""
    named = schema.get("type", "string")
    return "string" not in (named if isinstance(named, list) else [named])


def _meaning(schema: Any) -> Schema | None:
    """Returns a schema without annotations."""
    if not isinstance(schema, dict):
        return None
    return {name: value for name, value in schema.items() if not is_annotation(name)}


def _move_names(schema: Schema, resolve: Callable[[str], Any]) -> None:
    """Removes `propertyNames` that any name follows; others become a pattern, where they can."""
    names = _meaning(schema["propertyNames"])
    if names is not None and names.keys() == {"$ref"} and isinstance(names["$ref"], str):
        names = _meaning(resolve(names["$ref"]))
    if names is None:
        return
    if names.get("format") in FREE:
        del names["format"]
    if not names or names == {"type": "string"}:
        del schema["propertyNames"]
        return
    pattern = _pattern_of_names(names)
    if pattern is None or schema.keys() & {"properties", "patternProperties"}:
        return
    del schema["propertyNames"]
    value = schema.get("additionalProperties", {})
    schema |= {"patternProperties": {pattern: value}, "additionalProperties": False}


def _pattern_of_names(schema: Schema) -> str | None:
    """Returns the expression of the names that a schema lets through, if it has a plain one."""
    if schema.get("type", "string") != "string":
        return None
    match {name: value for name, value in schema.items() if name != "type"}:
        case {"enum": list(texts), **others} if not others:
            return _one_of(texts)
        case {"const": text, **others} if not others:
            return _one_of([text])
        case {"pattern": str(pattern), **others} if not others:
            return pattern
        case lengths if lengths.keys() <= {"minLength", "maxLength"}:
            return f"^(?s:.){{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"
    return None


def _one_of(values: list[Any]) -> str | None:
    """Returns the expression of the texts among some values, if there are any."""
    texts = [re.escape(value) for value in values if isinstance(value, str)]
    return f"^(?:{'|'.join(texts)})$" if texts else None
