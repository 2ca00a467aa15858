"""Outputs that a schema refuses are not admitted where llguidance alone would admit them."""

import json

import pytest

from services.engine.errors import InvalidRequestError
from services.engine.grammar.formats import FORMATS
from tests.support.grammar_follower import GrammarFollower


@pytest.fixture(scope="module")
def follower():
    return GrammarFollower()


TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
NAMED = {"type": "object", "properties": {"name": NULL}, "additionalProperties": TEXT}
PATTERNED = {"type": "object", "patternProperties": {"^x-": NULL}, "additionalProperties": TEXT}


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        (
            NAMED,
            ['{"name":null}', '{"na":"a","names":"b","":"c"}', '{"n\u00e9":"a","\\n":"b"}'],
            ['{"n\\u0061me":"a"}', '{"name":"a"}'],
        ),
        ({**NAMED, "additionalProperties": {}}, ['{"name":null,"a":1}'], ['{"na\\u006de":1}']),
        (
            PATTERNED,
            ['{"x-a":null,"x":"a","a":"b"}'],
            ['{"\\u0078-a":"a"}', '{"x-":"a"}', '{"a":null}'],
        ),
        (
            {**PATTERNED, "properties": {"a": INTEGER}, "required": ["a", "b"]},
            ['{"a":1,"b":"c"}', '{"a":1,"b":"c","x-d":null,"e":"f"}'],
            ['{"a":1}', '{"a":1,"b":"c","\\u0061":"d"}'],
        ),
        (
            {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/$defs/a"}, NULL]},
                "$defs": {"a": NAMED},
            },
            ['[{"name":null},null]'],
            ['[{"\\u006eame":"a"}]'],
        ),
    ],
)
def test_a_name_spelled_by_escapes_is_no_other_name(follower, schema, admitted, refused):
    assert [text for text in admitted + refused if follower.admits(schema, text)] == admitted


@pytest.mark.parametrize("name", ['a"', '"', "\\", "a/b", "\u00e9", "\U0001f600", "a\n", "", "a"])
def test_a_property_keeps_its_schema_whatever_its_name_is(follower, name):
    schema = {"type": "object", "properties": {name: NULL}, "additionalProperties": INTEGER}
    own, other = (json.dumps(text, ensure_ascii=False) for text in (name, name + "z"))
    assert follower.admits(schema, f"{{{own}:null,{other}:1}}")
    assert not follower.admits(schema, f"{{{own}:1}}")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"allOf": [{"properties": {"a": NULL}}, {"properties": {"b": NULL}}]}, '{"a":null,"c":1}'),
        ({"properties": {"a": NULL}, "anyOf": [{"required": ["b"]}]}, '{"a":null,"b":1}'),
        ({"properties": {f"a{i}": NULL for i in range(50)}}, '{"a1":null,"b":1}'),
        ({"properties": {"a" * 99: NULL}}, '{"b":1}'),
        ({"patternProperties": {"[0-9]$": NULL}}, '{"a1":null,"b":2}'),
    ],
)
def test_objects_that_are_combined_or_large_have_additional_properties(follower, schema, text):
    assert follower.admits({"type": "object", **schema}, text)


@pytest.mark.parametrize(
    ("pattern", "admitted", "refused"),
    [
        ('^[^"]+$', ['"a"', r'"\\"', r'"\n"'], [r'"\""']),
        (r'^[^\\/:*?"<>|]+$', ['"a.b"'], [r'"\\"', r'"\""', '"/"']),
        (r"^\[\^[^\n]$", [r'"[^a"', r'"[^\\"'], [r'"[^\n"', r'"[a"']),
    ],
)
def test_a_negated_class_has_no_quote_that_it_excludes(follower, pattern, admitted, refused):
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in admitted + refused if follower.admits(schema, text)] == admitted


@pytest.mark.parametrize(
    ("name", "admitted", "refused"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "0001-01-01", "0004-02-29", "2023-12-31", "1900-02-28"],
            ["2023-02-29", "1900-02-29", "0000-01-01", "0000-02-29", "2023-04-31", "0100-02-29"],
        ),
        (
            "date-time",
            ["2024-02-29T00:00:00Z", "2023-01-01t23:59:59.5+02:00"],
            ["2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z", "2023-01-01T00:00:60Z"],
        ),
        ("time", ["12:00:00Z", "23:59:59.25-01:00"], ["12:00:00", "12:00:60Z", "24:00:00Z"]),
        ("partial-date-time", ["2024-02-29T00:00:00"], ["2024-02-29T00:00:00Z"]),
        ("time-local", ["12:00:00"], ["12:00:00Z"]),
        ("uint64", ["0", "18446744073709551615"], ["-1", "01", "a"]),
        ("int64", ["-5"], ["1.5"]),
        ("decimal", ["-1.50", "2"], ["1e5", ".5"]),
        ("byte", ["", "YQ==", "YWI="], ["YQ=", "a_b="]),
        ("base64url", ["YQ", "a_b-"], ["a"]),
        ("char", ["a", "\u00e9"], ["", "ab"]),
        ("json-pointer", ["", "/a~1b/0"], ["a", "/~2"]),
        (
            "uuid4",
            ["9b2f1f0a-6f57-4d7e-8a52-5a3f0c2d1e4b"],
            ["9b2f1f0a-6f57-1d7e-8a52-5a3f0c2d1e4b"],
        ),
    ],
)
def test_formats_are_followed_exactly(follower, name, admitted, refused):
    assert name in FORMATS
    schema = {"type": "string", "format": name}
    texts = admitted + refused
    assert [t for t in texts if follower.admits(schema, json.dumps(t, ensure_ascii=False))] == (
        admitted
    )


def test_a_format_and_a_pattern_are_both_followed(follower):
    schema = {"type": "string", "format": "date", "pattern": "^2"}
    assert follower.admits(schema, '"2024-02-29"')
    assert not follower.admits(schema, '"2023-02-29"')
    assert not follower.admits(schema, '"1996-02-29"')


BIG = 2**63


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("bounds", "admitted", "refused"),
    [
        ({"minimum": -BIG}, ["-5", str(-BIG + 1024), str(BIG)], [str(-BIG - 1)]),
        ({"minimum": -BIG, "maximum": BIG - 1}, ["0", str(BIG - 2048)], [str(BIG)]),
        ({"minimum": 0, "maximum": 2 * BIG - 1}, ["0", str(2**62)], ["-1", str(2 * BIG)]),
        ({"minimum": -3.4e38, "maximum": 3.4e38}, ["-7", str(2**62)], ["1" + "0" * 39]),
        ({"exclusiveMinimum": -BIG - 1, "exclusiveMaximum": BIG}, ["-7"], [str(BIG)]),
        (
            {"minimum": 2**53 + 1, "maximum": 2**53 + 5},
            [str(2**53 + 2), str(2**53 + 4)],
            [str(2**53), str(2**53 + 6)],
        ),
    ],
)
def test_bounds_that_no_double_holds_are_rounded_inwards(follower, kind, bounds, admitted, refused):
    schema = {"type": kind, **bounds}
    assert [text for text in admitted + refused if follower.admits(schema, text)] == admitted


def test_the_largest_integer_of_64_bits_is_admitted(follower):
    schema = {"type": "integer", "minimum": -BIG, "maximum": BIG - 1}
    assert follower.admits(schema, str(BIG - 1))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"const": 2**53 + 1}, "value 9007199254740993, which no double holds"),
        ({"enum": ["a", [{"b": 2**70}]]}, "value 1180591620717411303424"),
        ({"type": "integer", "minimum": BIG}, "minimum 9223372036854775808; the limit"),
        ({"type": "number", "maximum": -1e30}, "maximum -1e.30; the limit"),
    ],
)
def test_a_number_that_cannot_be_followed_is_refused(follower, schema, why):
    with pytest.raises(InvalidRequestError, match=why):
        follower.admits(schema, "1")
