"""Grammars of values that are no JSON at any depth, without white space.

With quotes of their own, strings have no escapes and names no quotes:
`{a:[1,<|"|>text<|"|>],b:{c:true}}`. As elements, members and items have tags around them:
`<a><item>1</item><item>2</item></a><b><c>true</c></b>`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.grammar.argument_pairs import DEFINITIONS, PairRules, Texts, text_before
from services.engine.grammar.inert_keywords import is_annotation

_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords that are enforced for values of each type."""
_TYPES = {**_OF_TYPE, "integer": _OF_TYPE["number"]}
_LIST = ('"["', '","', '"]"')
_ITEM = "item"
"""The name of elements of lists."""


class NestedValues:
    """Writes the rules of one part's values."""

    def __init__(self, prefix: str, form: Mapping[str, Any], texts: Texts) -> None:
        """Starts without rules.

        Args:
            prefix: begins the names of the rules.
            form: the fields of ArgumentPairs of protos/common/v1/sampling.proto.
            texts: converts what the values consist of.
        """
        self._prefix = prefix
        self._form = form
        self._texts = texts
        self._rule_of: dict[str, str] = {}
        self._num_rules = 0
        self.rules: list[str] = []

    def expression(self, schema: Any) -> str:
        """Returns the name of the rule of a value, and adds the rules that it needs.

        Raises:
            InvalidRequestError: the schema has a keyword that this form cannot keep.
        """
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise InvalidRequestError("json_schema has a value that none can be")
        # Equal schemas have one rule, which ends the recursion of references and of any value.
        key = json.dumps(schema, sort_keys=True)
        if key not in self._rule_of:
            rule = self._rule_of[key] = self._new_rule()
            self.rules.append(f"{rule}: {' | '.join(self._forms(schema))}")
        return self._rule_of[key]

    def _new_rule(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_value_{self._num_rules}"

    def _forms(self, schema: dict[str, Any]) -> list[str]:
        """Returns the alternatives of a value."""
        shared = {name: schema[name] for name in DEFINITIONS if name in schema}
        own = {
            name: value
            for name, value in schema.items()
            if name not in DEFINITIONS and not is_annotation(name)
        }
        match own:
            case {"$ref": str(path), **others} if not others:
                return [self.expression({**_definition(schema, path), **shared})]
            case {"anyOf": list(choices), **others} if not others:
                return [self.expression({**_plain(choice), **shared}) for choice in choices]
            case {"const": value, **others} if others.keys() <= {"type"}:
                return [self._literal(value)]
            case {"enum": list(values), **others} if others.keys() <= {"type"} and values:
                return [self._literal(value) for value in values]
        named = own.pop("type", list(_OF_TYPE))
        types = named if isinstance(named, list) else [named]
        if wrong := [each for each in types if each not in list(_TYPES)]:
            raise InvalidRequestError(f"json_schema has the type {wrong[0]!r:.64}")
        for keyword in own:
            if not any(keyword in _TYPES.get(each, ()) for each in types):
                raise InvalidRequestError(
                    f"json_schema has {keyword!r}, which the model's format of calls cannot enforce"
                    f" for a value of {' or '.join(types):.64}"
                )
        return [
            self._of_type(each, {name: own[name] for name in own if name in _TYPES[each]}, shared)
            for each in types
        ]

    def _of_type(self, name: str, own: dict[str, Any], shared: dict[str, Any]) -> str:
        match name:
            case "string" if self._form["quote"]:
                text, rules = text_before(
                    self._form["quote"], self._new_rule(), own, texts=self._texts
                )
                self.rules += rules
                return f"{self._texts.fixed(self._form['quote'])} {text}"
            case "array":
                return self._array(own, shared)
            case "object":
                pairs = self._pairs()
                expression = pairs.expression({**own, **shared})
                self.rules += pairs.rules
                return expression if self._form["elements"] else f'"{{" {expression} "}}"'
        return self._texts.of_schema({"type": name, **own})

    def _array(self, own: dict[str, Any], shared: dict[str, Any]) -> str:
        low, high = own.get("minItems", 0), own.get("maxItems")
        if not all(isinstance(each, int) for each in (low, 0 if high is None else high)):
            raise InvalidRequestError("json_schema has a number of items that is none")
        opening, comma, closing = ("", "", "") if self._form["elements"] else _LIST
        if high == 0:
            return f"{opening} {closing}"
        item = self._item(_plain(own.get("items", {})), shared)
        most = "" if high is None else high - 1
        items = f"{item} ({comma} {item}){{{max(low - 1, 0)},{most}}}"
        return f"{opening} {items if low else f'({items})?'} {closing}"

    def _item(self, schema: dict[str, Any], shared: dict[str, Any]) -> str:
        if not self._form["elements"]:
            return self.expression({**schema, **shared})
        pairs = self._pairs()
        rule = pairs.pair(_ITEM, schema, shared)
        self.rules += pairs.rules
        return rule

    def _pairs(self) -> PairRules:
        return PairRules(self._new_rule(), self._form, of_schema=self.expression, texts=self._texts)

    def _literal(self, value: Any) -> str:
        """Returns the expression of one value."""
        if isinstance(value, str) and self._form["quote"]:
            quote = self._texts.fixed(self._form["quote"])
            return f"{quote} {json.dumps(value, ensure_ascii=False) if value else ''} {quote}"
        if isinstance(value, dict | list):
            raise InvalidRequestError(
                "json_schema has an enum or const of lists or objects, which the model's format of"
                " calls cannot enforce"
            )
        return json.dumps(json.dumps(value))


def _plain(schema: Any) -> dict[str, Any]:
    """Returns a schema as an object."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError("json_schema has a value that none can be")
    return schema


def _definition(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Returns the schema that a reference names."""
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", path)
    definitions = schema.get(found[1]) if found else None
    if not found or not isinstance(definitions, dict) or found[2] not in definitions:
        raise InvalidRequestError(f"json_schema refers to {path!r:.64}, which is no definition")
    return _plain(definitions[found[2]])
