"""Values without quotes are strings or JSON, as their schema says."""

import json

import pytest

from services.frontend.reply.bare_values import ArgumentSchemas

DEFINITIONS = {
    "$defs": {
        "code": {"type": "string", "enum": ["12"]},
        "a/b c": [{"const": "1"}],
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "string"}]},
        "other_circle": {"$ref": "#/$defs/other_circle"},
    }
}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ('"a"', {"type": "string"}, '"a"'),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", OPTIONAL, "12"),
        ("12", {"enum": ["12", None]}, "12"),
        ('"a"', {"enum": ["a"]}, "a"),
        ('"a"', {"type": ["string"]}, "a"),
        ("2", {"enum": ["12", 2]}, 2),
        ("null", OPTIONAL, None),
        ("None", OPTIONAL, None),
        ('"a"', OPTIONAL, "a"),
        ("a", OPTIONAL, "a"),
        ("True", {"type": "boolean"}, True),
        ("True", {}, "True"),
        (" 12\n", {"type": "integer"}, 12),
        ("12", {"type": ["string", "number"]}, 12),
        ("12", {}, 12),
        ("[1, 2]", {"$ref": "#/$defs/list"}, [1, 2]),
        ("NaN", {"type": "number"}, "NaN"),
        ("[Infinity]", {}, "[Infinity]"),
        ("[" * 10**5, {}, "[" * 10**5),
        ("1" * 5000, {}, "1" * 5000),
        ("12", {"$ref": "#/$defs/code"}, "12"),
        ("12", {"$ref": "#/$defs/a~1b%20c/0"}, "12"),
        ("12", {"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, "12"),
        ("null", {"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, None),
        ("12", {"oneOf": [{"$ref": "#/$defs/code"}, {"type": "integer"}]}, 12),
        ("12", {"allOf": [{"$ref": "#/$defs/code"}, {"minLength": 1}]}, "12"),
        ("12", {"allOf": [{"type": ["string", "number"]}, {"type": ["string", "null"]}]}, "12"),
        ("12", {"const": "12"}, "12"),
        ("12", {"const": 12}, 12),
        ("12", {"$ref": "#/$defs/circle"}, "12"),
        ("12", {"$ref": "#/$defs/other_circle"}, 12),
        ("12", {"$ref": "https://elsewhere/schema"}, 12),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"enum": ["a"], "nullable": True}, None),
        ('"a"', {"$ref": "#/$defs/code"}, "a"),
        ("['a', 1.5, {'b': (True, None)}]", {"type": "array"}, ["a", 1.5, {"b": [True, None]}]),
        ("{'a': 1}", {"type": ["object", "null"]}, {"a": 1}),
        ("['a'", {"type": "array"}, "['a'"),
        ("['a']", {}, "['a']"),
        ("12", True, 12),
        ("12", {"anyOf": 1, "type": None}, 12),
    ],
)
def test_a_value_is_what_its_schema_has(written, schema, value):
    schemas = ArgumentSchemas({"properties": {"a": schema}, **DEFINITIONS})
    assert json.loads(schemas.json_of(written, "a")) == value


def test_arguments_are_found_in_all_parts_of_a_tools_schema():
    text = {"type": "string"}
    for schema in (
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": text}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": text}}]},
        {"additionalProperties": text},
        {"properties": {"b": {}}, "additionalProperties": text},
    ):
        assert ArgumentSchemas(schema).json_of("12", "a") == '"12"'
    for schema in (None, {}, {"properties": 1}, {"additionalProperties": False}, {"$ref": "#"}):
        assert ArgumentSchemas(schema).json_of("12", "a") == "12"


def test_a_schema_that_is_too_deep_says_nothing():
    schema = {"type": "string"}
    for _ in range(10**5):
        schema = {"allOf": [schema]}
    assert ArgumentSchemas({"properties": {"a": schema}}).json_of("12", "a") == "12"
