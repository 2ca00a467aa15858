"""Grammars of arguments that are written as pairs of a name and a value, not as a JSON object."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.grammar.schema import is_annotation

_USED = frozenset({"type", "properties", "required", "additionalProperties"})
_DEFINITIONS = ("$defs", "definitions")
_BARE = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_NAME = r"/[\w.-]+/"

Expression = Callable[[Mapping[str, Any]], str]
"""Converts a JSON schema to a Lark expression."""


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
        fixed: Callable[[str], str],
        up_to: Callable[[str, str], list[str]],
    ) -> None:
        """Starts without rules.

        Args:
            prefix: begins the names of the rules.
            form: the fields of ArgumentPairs of protos/common/v1/sampling.proto.
            of_schema: converts the schema of a value.
            fixed: converts a fixed text.
            up_to: writes the rules of free text up to a fixed text.
        """
        self._prefix = prefix
        self._form = form
        self._of_schema = of_schema
        self._fixed = fixed
        self._up_to = up_to
        self.rules: list[str] = []

    def expression(self, schema: Mapping[str, Any]) -> str:
        """Returns the expression of a document's pairs, and adds the rules that it needs.

        Raises:
            InvalidRequestError: the schema is not that of plain properties.
        """
        for keyword in schema:
            if not (keyword in _USED or keyword in _DEFINITIONS or is_annotation(keyword)):
                raise InvalidRequestError(
                    f"json_schema has {keyword!r} for all arguments, which the model's format of"
                    " calls cannot enforce; only that of one argument may have it"
                )
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("type", "object") != "object" or not isinstance(properties, dict):
            raise InvalidRequestError("json_schema is not that of an object")
        if missing := [name for name in required if name not in properties]:
            raise InvalidRequestError(f"json_schema has no property {missing[0]!r:.64}")
        shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
        if not properties and schema.get("additionalProperties") is not False:
            return self._any_pairs()
        pairs = [
            (self._pair(index, name, value, shared), name in required)
            for index, (name, value) in enumerate(properties.items())
        ]
        return self._sequence(pairs)

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

    def _pair(self, index: int, name: str, schema: Any, shared: Mapping[str, Any]) -> str:
        rule = f"{self._prefix}_pair_{index}"
        before = self._fixed(f"{self._form['begin']}{name}{self._form['assign']}")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"the property {name!r:.64} has no schema of its own")
        if self._form["bare_strings"] and schema.get("type") == "string":
            value = self._bare_string(rule, schema)
        elif self._form["python_names"] and schema.get("type") == "boolean":
            value = f'("True" | "False") {self._text("end")}'
        else:
            value = f"{self._of_schema({**schema, **shared})} {self._text('end')}"
        self.rules.append(f"{rule}: {before} {value}")
        return rule

    def _bare_string(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Returns the expression of a string without quotes, and of the text after it."""
        for keyword in schema:
            if not (keyword in _BARE or is_annotation(keyword)):
                raise InvalidRequestError(
                    f"json_schema has {keyword!r} for a string, which the model's format of calls"
                    " writes without quotes; it cannot be enforced there"
                )
        end = self._form["end"]
        texts = [schema["const"]] if "const" in schema else schema.get("enum")
        if texts is not None:
            choices = [json.dumps(text, ensure_ascii=False) for text in texts if text != ""]
            optional = "?" if "" in texts else ""
            if not all(isinstance(text, str) for text in texts) or not choices:
                raise InvalidRequestError("json_schema has an enum without a text")
            return f"({' | '.join(choices)}){optional} {self._text('end')}"
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if low or high is not None:
            # The first character of the text after it cannot be counted.
            any_but = f"[^{re.escape(end[0])}]".replace("/", r"\/").replace("\n", "n")
            count = f"{{{low},{'' if high is None else high}}}"
            self.rules.append(f"{rule}_text: /{any_but}{count}/")
            return f"{rule}_text {self._text('end')}"
        self.rules += self._up_to(f"{rule}_text", end)
        return f"{rule}_text"

    def _any_pairs(self) -> str:
        """Returns the expression of any pairs."""
        rule = f"{self._prefix}_any"
        before, assign = self._text("begin"), self._text("assign")
        value = f"{self._of_schema({})} {self._text('end')}"
        if self._form["bare_strings"]:
            self.rules += self._up_to(f"{rule}_text", self._form["end"])
            value = f"{rule}_text"
        self.rules.append(f"{rule}_name: {_NAME}")
        self.rules.append(f"{rule}: {before} {rule}_name {assign} {value}")
        return f"({rule} ({self._text('separator')} {rule})*)?"

    def _text(self, field: str) -> str:
        text = self._form[field]
        return self._fixed(text) if text else ""
