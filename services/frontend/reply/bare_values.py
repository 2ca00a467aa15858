"""Reads the values of arguments that are written without the quotes of JSON's strings."""

import json
from collections.abc import Iterator, Set
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote

from services.frontend.reply.python_values import json_of_python

_KINDS = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_CONTAINERS = frozenset({"array", "object"})


def json_of(written: str, schema: Any, kinds: Set[str]) -> str:
    """Returns a value as JSON: strings are written bare, all else as JSON or as Python's literals.

    A text that is JSON, too, is a string where its schema has strings and not that kind of JSON.
    """
    # As in grammars: any other schema has its strings in quotes.
    if isinstance(schema, dict) and schema.get("type") == "string" and "null" not in kinds:
        return json.dumps(written, ensure_ascii=False)
    text = written.strip()
    if kinds & {"boolean", "null"}:
        text = _PYTHON_NAMES.get(text, text)
    kind = _kind(text)
    if kind is None and kinds & _CONTAINERS:
        as_json = json_of_python(text)
        if (found := _kind(as_json)) in kinds:
            text, kind = as_json, found
    is_string = kind is None or ("string" in kinds and kind not in kinds)
    return json.dumps(written, ensure_ascii=False) if is_string else text


class ArgumentSchemas:
    """The schemas of a tool's arguments, or of what is in one, with what they refer to."""

    def __init__(self, tool_schema: Any, own: Any = None) -> None:
        """Takes the schema of all arguments, and that of one argument or item; None for all."""
        self._root, self._own = tool_schema, tool_schema if own is None else own
        self._within: dict[str, ArgumentSchemas] = {}
        self._kinds_at: dict[str, Set[str]] = {}
        self._found: dict[str, tuple[Any, Set[str]]] = {}
        self.parts = parts = list(self._parts())
        """The tool's schema and each that holds with it, or may."""
        self.by_name: dict[str, Any] = {}
        """The schema of each argument that has one, in the order of the tool's schema."""
        for part in parts:
            for name, schema in _object(part, "properties").items():
                self.by_name.setdefault(name, schema)
        others = (part["additionalProperties"] for part in parts if "additionalProperties" in part)
        self._other: Any = next(others, {})

    def json_of(self, written: str, name: str) -> str:
        """Returns the value of an argument as JSON."""
        if name not in self._found:
            schema = self.by_name.get(name, self._other)
            try:
                self._found[name] = schema, self._kinds(schema)
            except RecursionError:  # it is too deep to say anything
                self._found[name] = {}, set()
        return json_of(written, *self._found[name])

    def within(self, name: str) -> "ArgumentSchemas":
        """Returns the schemas of what is in an argument."""
        if name not in self._within:
            all_members = [_object(part, "properties") for part in self.parts]
            own = [members[name] for members in all_members if name in members]
            self._within[name] = ArgumentSchemas(self._root, _either(own or [self._other]))
        return self._within[name]

    @cached_property
    def items(self) -> "ArgumentSchemas":
        """The schemas of what is in the items of a list."""
        own = [part["items"] for part in self.parts if "items" in part]
        return ArgumentSchemas(self._root, _either(own or [{}]))

    @property
    def is_list(self) -> bool:
        """Whether a value with items is a list; it may be where its schema does not say."""
        return "array" in self._own_kinds or "object" not in self._own_kinds

    def value(self, written: str) -> str:
        """Returns a value without parts as JSON."""
        if not written.strip() and "string" not in self._own_kinds:
            for kind, empty in (("array", "[]"), ("object", "{}")):
                if kind in self._own_kinds:
                    return empty
        return json_of(written, self._own, self._own_kinds)

    @cached_property
    def _own_kinds(self) -> Set[str]:
        try:
            return self._kinds(self._own)
        except RecursionError:  # it is too deep to say anything
            return set()

    def _parts(self) -> Iterator[dict[str, Any]]:
        """Yields the tool's schema and each schema that holds with it, or may."""
        waiting, known = [self._own], set()
        for part in waiting:  # which grows
            if not isinstance(part, dict):
                continue
            yield part
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in known:
                known.add(reference)
                waiting.append(self._target(reference))
            for keyword in ("allOf", "anyOf", "oneOf"):
                waiting += _list(part, keyword)

    def _kinds(self, schema: Any) -> set[str]:
        """Returns the kinds of values that a schema names; none if it does not say."""
        if not isinstance(schema, dict):
            return set()
        kinds: set[str] = set()
        for named in self._named(schema):
            named |= {"integer"} if "number" in named else set()
            # All of them hold; a later one that contradicts the others says nothing.
            kinds = (kinds & named or kinds) if kinds else named
        return kinds | {"null"} if kinds and schema.get("nullable") is True else kinds

    def _named(self, schema: dict[str, Any]) -> Iterator[set[str]]:
        """Yields the kinds that each keyword of a schema names, if it names any."""
        named = schema.get("type")
        named = named if isinstance(named, list) else [named]
        yield {each for each in named if isinstance(each, str)}
        values = [schema["const"]] if "const" in schema else _list(schema, "enum")
        yield {_KINDS[type(value)] for value in values}
        for part in _list(schema, "allOf"):
            yield self._kinds(part)
        for keyword in ("anyOf", "oneOf"):
            yield set().union(*(self._kinds(choice) for choice in _list(schema, keyword)))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._kinds_at:
                self._kinds_at[reference] = set()  # for references that run in circles
                self._kinds_at[reference] = self._kinds(self._target(reference))
            yield set(self._kinds_at[reference])

    def _target(self, reference: str) -> Any:
        """Returns the schema that a reference names, such as `#/$defs/code`; None if none does."""
        if not reference.startswith("#"):
            return None
        target = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, dict) else None
        return target


def _either(schemas: list[Any]) -> Any:
    """Returns the schema of a value that has one of some schemas."""
    choices = list({id(each): {} if each is None else each for each in schemas}.values())
    # Where all are strings, grammars write them bare.
    are_strings = all(isinstance(each, dict) and each.get("type") == "string" for each in choices)
    return choices[0] if are_strings or len(choices) == 1 else {"anyOf": choices}


def _kind(text: str) -> str | None:
    """Returns the kind of a JSON value; None if the text is none."""
    try:
        return _KINDS[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _object(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are Python's, not JSON's
