"""Values without quotes are strings or JSON, as their schema says."""

import json

import pytest

from services.frontend.reply.bare_values import json_of, schema_of

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ('"a"', {"type": "string"}, '"a"'),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", OPTIONAL, "12"),
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
        ("12", True, 12),
        ("12", {"anyOf": 1, "type": None}, 12),
    ],
)
def test_a_value_is_what_its_schema_has(written, schema, value):
    assert json.loads(json_of(written, schema)) == value


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"properties": {"a": {"type": "null"}}}, {"type": "null"}),
        ({"properties": 1}, {}),
        (None, {}),
    ],
)
def test_an_argument_without_a_schema_has_an_empty_one(schema, found):
    assert schema_of(schema, "a") == found
