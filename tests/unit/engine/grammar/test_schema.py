"""Which keywords of JSON Schema are followed, and that all others are refused."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from services.engine.errors import InvalidRequestError
from services.engine.grammar.formats import FORMATS, FREE, OF_LIBRARY
from services.engine.grammar.grammar_text import compile_grammar, grammar_text
from services.engine.grammar.inert_keywords import ANNOTATIONS
from services.engine.grammar.schema import ENFORCED, MAX_DEPTH, read_schema
from services.engine.structured_output import GrammarKind, StructuredOutput
from tests.support.grammar_follower import GrammarFollower

DOCUMENT = Path(__file__).parents[4] / "docs" / "structured-output.md"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

FOLLOWED = {
    "$anchor": {"$defs": {"a": {"$anchor": "x", "type": "null"}}, "$ref": "#x"},
    "$defs": {"$defs": {"a": {"type": "null"}}, "items": {"$ref": "#/$defs/a"}, "type": "array"},
    "$id": {"$id": "http://e/x", "$defs": {"a": {"type": "null"}}, "$ref": "http://e/x#/$defs/a"},
    "$ref": {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {"type": "string"}}},
    "$schema": {"$schema": DRAFT_7, "type": "array", "items": [{"type": "null"}], "maxItems": 2},
    "additionalItems": {"$schema": DRAFT_7, "type": "array", "items": [{"type": "null"}],
                        "additionalItems": {"type": "boolean"}, "maxItems": 3},
    "additionalProperties": {"type": "object", "properties": {"a": {"type": "integer"}},
                             "additionalProperties": {"type": "null"}},
    "allOf": {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "const": {"const": {"a": [1, 2]}},
    "definitions": {"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a"},
    "enum": {"enum": [1, "a", None, {"b": [1.5]}]},
    "exclusiveMaximum": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "exclusiveMinimum": {"$schema": DRAFT_4, "type": "integer", "minimum": 3,
                         "exclusiveMinimum": True, "maximum": 9},
    "format": {"type": "string", "format": "date"},
    "id": {"$schema": DRAFT_4, "id": "http://e/x", "type": "null"},
    "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    "maxItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "maxLength": {"type": "string", "maxLength": 3},
    "maxProperties": {"type": "object", "patternProperties": {"^a[0-9]$": {"type": "null"}},
                      "additionalProperties": False, "minProperties": 2, "maxProperties": 3},
    "maximum": {"type": "integer", "minimum": -5, "maximum": 12},
    "minItems": {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 5},
    "minLength": {"minLength": 2, "maxLength": 3},
    "minProperties": {"type": "object", "required": ["zz"], "additionalProperties": {"const": 1},
                      "minProperties": 2, "maxProperties": 2},
    "minimum": {"minimum": 1.5, "maximum": 2, "type": "number"},
    "multipleOf": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    "pattern": {"type": "string", "pattern": "b[0-9]", "maxLength": 6},
    "patternProperties": {"type": "object", "patternProperties": {"b": {"type": "null"}},
                          "properties": {"ab": {}}, "required": ["ab"],
                          "additionalProperties": False},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}],
                    "items": False},
    "properties": {"type": "object", "properties": {"c": {"$ref": "#"}},
                   "additionalProperties": False},
    "required": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                 "required": ["b"], "additionalProperties": False},
    "type": {"type": ["integer", "null"]},
}  # fmt: skip
"""A schema for each keyword, in which an output would go wrong if the keyword were ignored."""


@pytest.fixture(scope="module")
def follower():
    return GrammarFollower()


def test_every_enforced_keyword_has_a_schema():
    assert set(FOLLOWED) == ENFORCED


@pytest.mark.parametrize("keyword", sorted(FOLLOWED))
def test_outputs_validate_under_each_keyword(follower, keyword):
    rng = np.random.default_rng(0)
    schema = FOLLOWED[keyword]
    outputs = [follower.draw(schema, rng) for _ in range(8)]
    for output in outputs:
        if output is not None:
            jsonschema.validate(json.loads(output), schema)
    assert outputs != [None] * 8


@pytest.mark.parametrize("name", sorted(OF_LIBRARY | {"date", "date-time", "json-pointer", "time"}))
def test_outputs_validate_under_each_format(follower, name):
    rng = np.random.default_rng(0)
    schema = {"type": "string", "format": name}
    for output in [follower.draw(schema, rng) for _ in range(4)]:
        if output is not None:
            jsonschema.validate(
                json.loads(output),
                schema,
                format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
            )


@pytest.mark.parametrize(
    "keyword",
    [
        "$dynamicRef", "$recursiveRef", "contains", "contentEncoding", "dependencies",
        "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "extends", "maxLenght",
        "not", "nullable", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "place",
    [
        "{}", '{{"properties": {{"a": {}}}}}', '{{"items": [{}]}}', '{{"items": {}}}',
        '{{"anyOf": [{{"$defs": {{"a": {}}}}}]}}', '{{"additionalProperties": {}}}',
        '{{"patternProperties": {{"a": {}}}}}', '{{"$ref": "#/x-a/0", "x-a": [{}]}}',
        '{{"$ref": "#/x-%20a~1", "x- a/": {}}}',
    ],
)  # fmt: skip
def test_a_keyword_that_is_not_enforced_is_refused_by_name_wherever_it_is(keyword, place):
    with pytest.raises(InvalidRequestError, match=re.escape(repr(keyword))):
        read_schema(place.format(json.dumps({keyword: {"const": 1}})))


def test_names_of_properties_and_values_are_not_keywords():
    names = {"if": {}, "not": {"const": {"nullable": 1}}, "x": {"enum": [{"uniqueItems": True}]}}
    schema = {
        "properties": names,
        "default": {"if": 1},
        "examples": [{"not": 1}],
        "x-own": {"a": 1},
    }
    assert read_schema(json.dumps(schema)) == schema


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_annotations_change_nothing(follower, keyword):
    schema = {"const": 1, keyword: "any"}
    assert follower.draw(schema, np.random.default_rng(0)) == "1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"type": "string", "format": "iri"}', "format 'iri'"),
        ('{"prefixItems": [{}], "additionalItems": {}}', "beside prefixItems"),
        ("[]", "not an object"),
        ('{"const": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "nests too deep"),
    ],
)
def test_what_else_is_refused(text, why):
    with pytest.raises(InvalidRequestError, match=why):
        read_schema(text)


def test_a_number_that_no_float_holds_is_refused():
    wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, ('{"maximum": 1e999}',))
    with pytest.raises(InvalidRequestError, match="too large"):
        grammar_text(wanted)


def nested(depth):
    return "".join('{"items":' for _ in range(depth - 1)) + "{}" + "}" * (depth - 1)


def test_schemas_nest_as_deep_as_is_promised_and_no_deeper(follower):
    wanted = StructuredOutput(GrammarKind.JSON_SCHEMA, (nested(MAX_DEPTH),))
    matcher = compile_grammar(follower.tokenizer, grammar_text(wanted))
    assert not matcher.is_error(), matcher.get_error()
    with pytest.raises(InvalidRequestError, match=f"{MAX_DEPTH + 1} levels deep; .* {MAX_DEPTH}"):
        read_schema(nested(MAX_DEPTH + 1))


def test_a_schema_may_refer_to_itself(follower):
    tree = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "additionalProperties": False,
    }
    rng = np.random.default_rng(1)
    for output in [follower.draw(tree, rng) for _ in range(8)]:
        if output is not None:
            jsonschema.validate(json.loads(output), tree)


def test_the_documentation_names_every_keyword_and_format():
    text = DOCUMENT.read_text()
    for name in ENFORCED | ANNOTATIONS | FORMATS | FREE:
        assert f"`{name}`" in text, name
    assert f"{MAX_DEPTH} levels" in text
