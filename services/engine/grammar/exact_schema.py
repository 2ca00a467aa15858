"""Rewrites schemas so that llguidance follows them exactly."""

import math
import re
from collections.abc import Iterable
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.grammar.formats import PATTERNS
from services.engine.grammar.inert_keywords import is_annotation

LARGEST = 2**63 - 1024
"""The largest double among numbers of 64 bits; llguidance takes bounds as doubles."""
_LARGEST_EXACT = 2**53
"""Up to here, every integer is a double."""
_NO_CONSTRAINTS = frozenset({"$anchor", "$defs", "$ref", "anyOf", "definitions", "oneOf"})
_PREFIX = re.compile(r"\^([\w -]+)(\$?)", re.ASCII)
"""A pattern of names that begin with a text, or are that text."""
_NEGATED_CLASS = re.compile(r"\\.|(\[\^)", re.DOTALL)
"""Also escaped characters, which begin no class."""
_MOST_NAMES = 32
_LONGEST_NAME = 60
"""Names of an object, and their characters, that are kept from additional properties: llguidance
matches each with the regular expression of all others, which takes 7 ms for 300 names of 20
characters; groups nest as deep as names are long, and 250 may."""

Schema = dict[str, Any]


def make_exact(schemas: list[Schema]) -> None:
    """Rewrites a document's schemas, all of which are given.

    Raises:
        InvalidRequestError: a value or a bound cannot be followed, as llguidance's numbers are
            doubles.
    """
    are_apart = not any(map(_combines_schemas, schemas))
    for schema in schemas:
        _check_values(schema)
        _round_bounds(schema)
        _write_format(schema)
        _write_classes(schema)
        if are_apart:
            _exclude_names(schema)


def _combines_schemas(schema: Schema) -> bool:
    """Whether outputs follow several schemas at once, which llguidance makes one of."""
    applied = schema.keys() & {"$ref", "anyOf", "oneOf"}
    constraints = {name for name in schema if not is_annotation(name)} - _NO_CONSTRAINTS
    return "allOf" in schema or len(applied) > 1 or bool(applied and constraints)


def _check_values(schema: Schema) -> None:
    waiting = [schema.get("const"), schema.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and (abs(value) > LARGEST or int(float(value)) != value):
            raise InvalidRequestError(
                f"json_schema has the value {value!s:.40}, which no double holds; use a string"
            )


def _round_bounds(schema: Schema) -> None:
    """Rounds large bounds towards what they allow, to numbers that llguidance can represent."""
    of_integers = schema.get("type") == "integer"
    for keyword in schema.keys() & {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}:
        bound = schema[keyword]
        if not isinstance(bound, int | float) or not _LARGEST_EXACT < abs(bound) < math.inf:
            continue
        sign = 1 if "inimum" in keyword else -1  # of the direction of what it allows
        if sign * bound > LARGEST:
            raise InvalidRequestError(
                f"json_schema has {keyword} {bound!r:.40}; the limit is {sign * LARGEST}"
            )
        if of_integers and sign < 0 and bound >= 2**63 - 1:
            schema[keyword] = 2**63 - 1  # llguidance takes it exactly here
        elif abs(bound) > LARGEST:
            schema[keyword] = -sign * LARGEST
        elif isinstance(bound, int) and sign * int(float(bound)) < sign * bound:
            schema[keyword] = int(math.nextafter(float(bound), sign * math.inf))


def _write_format(schema: Schema) -> None:
    """Replaces a format by its regular expression, where it has one."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return
    pattern = PATTERNS[schema.pop("format")]
    if "pattern" not in schema:
        schema["pattern"] = f"^(?:{pattern})$"
    else:
        schema.setdefault("allOf", []).append({"pattern": f"^(?:{pattern})$"})


def _write_classes(schema: Schema) -> None:
    r"""Excludes NUL from negated classes of characters.

    In JSON llguidance takes a class with all control characters for one with quotes and
    backslashes, too: [^"] matches a quote.
    """
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _without_nul(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_without_nul(p): value for p, value in patterns.items()}


def _without_nul(pattern: str) -> str:
    return _NEGATED_CLASS.sub(lambda found: rf"{found[0]}\x00" if found[1] else found[0], pattern)


def _exclude_names(schema: Schema) -> None:
    r"""Writes additional properties as properties whose names match a pattern.

    llguidance lets the names of additional properties escape any character, so that "\u0061" would
    be an "a" with another schema. Names that match a pattern only have the escapes that they need.
    """
    value = schema.get("additionalProperties", True)
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if value is False or not (properties or patterns):
        return
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return  # llguidance refuses it
    found = [_PREFIX.fullmatch(pattern) for pattern in patterns]
    is_large = len(properties) > _MOST_NAMES or max(map(len, properties), default=0) > _LONGEST_NAME
    if None in found or is_large:
        return
    taken = [(name, False) for name in properties]
    taken += [(each[1], not each[2]) for each in found if each]
    if (others := _other_texts(taken)) is not None:
        schema["patternProperties"] = {**patterns, f"^{others}$": value}
    schema["additionalProperties"] = False


def _other_texts(taken: Iterable[tuple[str, bool]]) -> str | None:
    """Returns a regular expression of all texts but some, or None where no text is left.

    Args:
        taken: each text, and whether texts that begin with it are taken, too.
    """
    rest: dict[str, list[tuple[str, bool]]] = {}
    is_taken = False
    for text, begins in taken:
        if not text and begins:
            return None
        if text:
            rest.setdefault(text[0], []).append((text[1:], begins))
        else:
            is_taken = True
    if not rest:
        return "(?s:.)+" if is_taken else "(?s:.)*"
    ways = [] if is_taken else [""]
    ways.append(rf"[^\x00{''.join(map(_escaped, rest))}](?s:.)*")
    inner = ((_escaped(first), _other_texts(texts)) for first, texts in rest.items())
    ways += [first + others for first, others in inner if others is not None]
    return f"(?:{'|'.join(ways)})"


def _escaped(character: str) -> str:
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else rf"\x{{{ord(character):x}}}"
