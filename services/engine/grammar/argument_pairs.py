"""Grammars of arguments that are written as pairs of a name and a value, not as a JSON object."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.grammar.inert_keywords import is_annotation

DEFINITIONS = ("$defs", "definitions")
"""Keywords whose schemas others refer to."""
_USED = frozenset({"type", "properties", "required", "additionalProperties"})
_BARE = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_NAME = r"/[\w.-]+/"
_ASCII_NAME = r"/[A-Za-z0-9_.-]+/"
"""A name without quotes; which other characters are letters, versions of Unicode disagree."""
_PLAIN_NAME = re.compile(r"[\w.-]+")

Expression = Callable[[Mapping[str, Any]], str]
"""Converts a JSON schema to a Lark expression."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Converts the parts of a form to Lark."""

    of_schema: Expression
    """Converts the schema of a value that is written as JSON."""
    fixed: Callable[[str], str]
    """Converts a fixed text."""
    up_to: Callable[[str, str], list[str]]
    """Writes the rules of free text up to a fixed text."""


class PairRules:
    """Writes the rules of one part's pairs.

    Properties come in the order of the schema, required ones always. Others are not allowed, unless
    the schema has no properties at all.
    """

    def __init__(
        self,
        prefix: str,
        form: Mapping[str, Any],
        *,
        of_schema: Expression,
        texts: Texts,
    ) -> None:
        """Starts without rules.

        Args:
            prefix: begins the names of the rules.
            form: the fields of ArgumentPairs of protos/common/v1/sampling.proto.
            of_schema: converts the schema of a value in the way that the form writes it.
            texts: converts what pairs consist of.
        """
        self._prefix = prefix
        self._form = form
        self._of_schema = of_schema
        self._texts = texts
        self._num_pairs = 0
        self.rules: list[str] = []

    def expression(self, schema: Mapping[str, Any]) -> str:
        """Returns the expression of a document's pairs, and adds the rules that it needs.

        Raises:
            InvalidRequestError: the schema is not that of plain properties.
        """
        for keyword in schema:
            if not (keyword in _USED or keyword in DEFINITIONS or is_annotation(keyword)):
                raise InvalidRequestError(
                    f"json_schema has {keyword!r} for all arguments, which the model's format of"
                    " calls cannot enforce; only that of one argument may have it"
                )
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type", "object") != "object" or not isinstance(properties, dict):
            raise InvalidRequestError("json_schema is not that of an object")
        if missing := [name for name in required if name not in properties]:
            raise InvalidRequestError(f"json_schema has no property {missing[0]!r:.64}")
        shared = {name: schema[name] for name in DEFINITIONS if name in schema}
        if not properties and schema.get("additionalProperties") is not False:
            return self._any_pairs(schema.get("additionalProperties", {}), shared)
        pairs = [
            (self.pair(name, value, shared), name in required) for name, value in properties.items()
        ]
        return self._sequence(pairs)

    def pair(self, name: str, schema: Any, shared: Mapping[str, Any]) -> str:
        """Returns the rule of a name and its value, and adds the rules that it needs.

        shared: definitions that the schema refers to.

        Raises:
            InvalidRequestError: the schema cannot be kept.
        """
        rule = f"{self._prefix}_pair_{self._num_pairs}"
        self._num_pairs += 1
        quote = "" if _PLAIN_NAME.fullmatch(name) else self._form["quote"]
        named = f"{name}{quote}{self._form['assign']}"
        ends_early = not quote and self._form["begin"] and self._form["assign"] in name
        if ends_early or (self._form["elements"] and name.startswith("/")):
            raise InvalidRequestError(
                f"the property {name!r:.64} has a name that the model's format of calls"
                " cannot write"
            )
        if schema is not True and not isinstance(schema, dict):
            raise InvalidRequestError(f"the property {name!r:.64} has no schema of its own")
        end = f"{self._form['end']}{named}" if self._form["elements"] else self._form["end"]
        value = self._value(rule, {} if schema is True else schema, shared, end)
        before = f"{self._form['begin']}{quote}{named}"
        self.rules.append(f"{rule}: {self._texts.fixed(before)} {value}")
        return rule

    def _sequence(self, pairs: list[tuple[str, bool]]) -> str:
        """Returns the rule of pairs in order; each state knows whether a pair came before."""
        prefix, separator = self._prefix, self._text("separator")
        self.rules.append(f'{prefix}_first_{len(pairs)}: ""')
        self.rules.append(f'{prefix}_more_{len(pairs)}: ""')
        for index, (pair, is_required) in enumerate(pairs):
            after, skipped = f"{prefix}_more_{index + 1}", f"{prefix}_first_{index + 1}"
            optional = "" if is_required else f" | {skipped}"
            self.rules.append(f"{prefix}_first_{index}: {pair} {after}{optional}")
            optional = "" if is_required else f" | {after}"
            self.rules.append(f"{prefix}_more_{index}: {separator} {pair} {after}{optional}")
        return f"{prefix}_first_0"

    def _value(
        self, rule: str, schema: Mapping[str, Any], shared: Mapping[str, Any], end: str
    ) -> str:
        """Returns the expression of a value, and of the text after it."""
        if self._form["bare_strings"] and schema.get("type") == "string":
            value, rules = text_before(end, rule, schema, texts=self._texts)
            self.rules += rules
            return value
        after = self._texts.fixed(end) if end else ""
        if self._form["python_names"] and schema.get("type") == "boolean":
            return f'("True" | "False") {after}'
        return f"{self._of_schema({**schema, **shared})} {after}"

    def _any_pairs(self, schema: Any, shared: Mapping[str, Any]) -> str:
        """Returns the expression of pairs with any names, whose values have one schema."""
        rule = f"{self._prefix}_any"
        before, assign = self._text("begin"), self._text("assign")
        if isinstance(schema, dict) and schema:
            value = self._value(rule, schema, shared, self._form["end"])
        elif self._form["bare_strings"]:
            self.rules += self._texts.up_to(f"{rule}_text", self._form["end"])
            value = f"{rule}_text"
        else:
            value = f"{self._of_schema({})} {self._text('end')}"
        self.rules += self._any_name(f"{rule}_name")
        after = f"{rule}_name {assign}" if self._form["elements"] else ""
        self.rules.append(f"{rule}: {before} {rule}_name {assign} {value} {after}")
        return f"({rule} ({self._text('separator')} {rule})*)?"

    def _any_name(self, rule: str) -> list[str]:
        quote = self._form["quote"]
        if not quote:
            return [f"{rule}: {_NAME}"]
        quoted = f"{self._texts.fixed(quote)} {rule}_quoted"
        return [
            f"{rule}: {_ASCII_NAME} | {quoted}",
            *self._texts.up_to(f"{rule}_quoted", quote),
        ]

    def _text(self, field: str) -> str:
        text = self._form[field]
        return self._texts.fixed(text) if text else ""


def text_before(
    end: str, rule: str, schema: Mapping[str, Any], *, texts: Texts
) -> tuple[str, list[str]]:
    """Returns the expression of a string and the fixed text after it, and the rules that it needs.

    Args:
        end: the fixed text, which the string does not have.
        rule: begins the names of the rules.
        schema: the string's.
        texts: converts the parts.

    Raises:
        InvalidRequestError: the schema has a keyword that cannot be kept without JSON's quotes.
    """
    for keyword in schema:
        if not (keyword in _BARE or is_annotation(keyword)):
            raise InvalidRequestError(
                f"json_schema has {keyword!r} for a string, which the model's format of calls"
                " writes without quotes; it cannot be enforced there"
            )
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        choices = [json.dumps(text, ensure_ascii=False) for text in values if text != ""]
        optional = "?" if "" in values else ""
        if not all(isinstance(text, str) for text in values) or not choices:
            raise InvalidRequestError("json_schema has an enum without a text")
        return f"({' | '.join(choices)}){optional} {texts.fixed(end)}", []
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        # The first character of the text after it cannot be counted.
        any_but = f"[^{re.escape(end[0])}]".replace("/", r"\/").replace("\n", "n")
        count = f"{{{low},{'' if high is None else high}}}"
        return f"{rule}_text {texts.fixed(end)}", [f"{rule}_text: /{any_but}{count}/"]
    return f"{rule}_text", texts.up_to(f"{rule}_text", end)
