"""Keywords that allow and forbid nothing are taken, and rarer words for common keywords, too."""

import json

import pytest

from services.engine.grammar.schema import read_schema
from tests.support.grammar_follower import GrammarFollower


@pytest.fixture(scope="module")
def follower():
    return GrammarFollower()


TEXT = {"type": "string"}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
RECORD = {"type": "object", "additionalProperties": {"type": "number"}}


@pytest.mark.parametrize(
    ("plain", "inert"),
    [
        ({"type": "integer"}, {"format": "uint32"}),
        ({"type": ["integer", "null"]}, {"format": "int64"}),
        ({"type": "number"}, {"format": "double"}),
        ({"type": "integer"}, {"format": "unix-time"}),
        ({"type": "integer"}, {"contentEncoding": "base64"}),
        (TEXT, {"format": "path"}),
        (TEXT, {"format": "password"}),
        (TEXT, {"format": "binary", "contentEncoding": "binary"}),
        ({**TEXT, "pattern": "^[0-9]{3}$"}, {"format": "made-up"}),
        (TEXT, {"contentMediaType": "application/json", "contentSchema": {"type": "array"}}),
        (TEXT, {"nullable": False}),
        ({"allOf": [TEXT]}, {"nullable": True}),
        (INTEGERS, {"uniqueItems": False}),
        ({**INTEGERS, "maxItems": 1}, {"uniqueItems": True}),
        (INTEGERS, {"minContains": 2, "maxContains": 1, "unevaluatedItems": True}),
        (RECORD, {"propertyNames": {"type": "string"}}),
        (RECORD, {"propertyNames": {"type": "string", "title": "Name"}}),
        (RECORD, {"propertyNames": {"type": "string", "format": "path"}}),
        ({**RECORD, "properties": {"a": {}}}, {"propertyNames": {"type": "string", "title": "N"}}),
        ({**RECORD, "$defs": {"N": {"type": "string"}}}, {"propertyNames": {"$ref": "#/$defs/N"}}),
        (RECORD, {"propertyNames": True, "unevaluatedProperties": {}}),
        (RECORD, {"dependentRequired": {}, "dependentSchemas": {}}),
        (RECORD, {"properties": None, "required": None, "$defs": None, "enum": None}),
        (RECORD, {"then": {"required": ["a"]}}),
        (RECORD, {"$dynamicAnchor": "node"}),
        (RECORD, {"if": {"required": ["a"]}}),
    ],
)
def test_a_keyword_without_effect_is_left_out(plain, inert):
    read = read_schema(json.dumps({**plain, **inert}))
    annotations = {"contentMediaType", "contentSchema"}
    assert {name: read[name] for name in read if name not in annotations} == plain


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ({**TEXT, "nullable": True}, ["null", '"a"'], ["1"]),
        ({**TEXT, "nullable": True, "enum": ["a"]}, ["null", '"a"'], ['"b"']),
        (
            {"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}},
            ['{"b":"x"}'],
            ['{"a":"x"}'],
        ),
        (
            {**RECORD, "propertyNames": {"enum": ["a.b", "c"]}, "required": ["c"]},
            ['{"c":1}', '{"c":1,"a.b":2}'],
            ['{"a.b":1}', '{"c":1,"d":2}', '{"c":1,"axb":2}', '{"c":"x"}'],
        ),
        ({**RECORD, "propertyNames": {"pattern": "^x"}}, ['{"xa":1}'], ['{"a":1}', '{"xa":"b"}']),
        ({**RECORD, "propertyNames": {"minLength": 2}}, ['{"ab":1}'], ['{"a":1}']),
        (
            {**RECORD, "propertyNames": {"type": "string", "minLength": 1, "maxLength": 2}},
            ['{"ab":1}'],
            ['{"abc":1}', '{"":1}'],
        ),
        ({**RECORD, "propertyNames": {"const": "k"}}, ['{"k":1}'], ['{"l":1}']),
        (
            {
                **RECORD,
                "propertyNames": {"$ref": "#/$defs/Key"},
                "$defs": {"Key": {"title": "Key", "type": "string", "enum": ["k"]}},
            },
            ['{"k":1}', "{}"],
            ['{"l":1}'],
        ),
        ({**TEXT, "contentEncoding": "base64"}, ['"YWI="', '""'], ['"YWI"', '"*"']),
    ],
)
def test_rarer_words_mean_what_the_common_ones_do(follower, schema, admitted, refused):
    assert [text for text in admitted + refused if follower.admits(schema, text)] == admitted
