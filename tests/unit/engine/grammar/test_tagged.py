"""Tagged texts: calls by every format's grammar, drawn at random, are read back as calls."""

import json

import jsonschema
import numpy as np
import pytest

from protos.common.v1 import sampling_pb2
from services.engine.edge.structured_output import structured_output_of
from services.engine.errors import InvalidRequestError
from services.engine.grammar.constraint import next_mask
from services.engine.grammar.grammar_text import (
    compile_grammar,
    grammar_text,
    make_tokenizer,
    special_tokens_of,
)
from services.frontend.reply.deltas import piece_of
from services.frontend.reply.format_choice import FORMATS
from services.frontend.text.tokenizer import Tokenizer
from tests.support.special_tokenizers import KINDS, end_token

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
WRITTEN = [name for name, reader in FORMATS.items() if reader.call_form]


class Follower:
    """Takes allowed tokens of a grammar by chance, over a tokenizer with a format's tokens."""

    def __init__(self, reader):
        tokenizer = KINDS["embedded"]()
        tokenizer.add_special_tokens(list(dict.fromkeys((*reader.special_tokens, *reader.think))))
        content = tokenizer.to_str()
        self.tokenizer, self.reader = tokenizer, reader
        self.end_id, self.size = end_token(tokenizer), tokenizer.get_vocab_size()
        self.special = special_tokens_of(content)
        self.grammars = make_tokenizer(content, vocab_size=self.size, eos_token_ids=[self.end_id])
        spelled = {*reader.special_tokens, *reader.think}
        files = {"tokenizer.json": content.encode()}
        self.text_of = Tokenizer(files).token_bytes_with(spelled)

    def matcher(self, wanted):
        output = structured_output_of(wanted, 2**16)
        matcher = compile_grammar(self.grammars, grammar_text(output, self.special))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, wanted, text):
        matcher = self.matcher(wanted)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.validate_tokens(ids) == len(ids) and (
            matcher.consume_tokens(ids) and matcher.is_accepting()
        )

    def follow(self, wanted, seed):
        """Returns a text of the grammar."""
        rng, matcher, token_ids = np.random.default_rng(seed), self.matcher(wanted), []
        pairs = self.reader.call_form.pairs
        ending = self.tokenizer.encode(pairs.end if pairs else "", add_special_tokens=False).ids
        while not matcher.is_stopped():
            # Chance alone does not spell the end of a bare string.
            if ending and rng.random() < 0.1 and matcher.validate_tokens(ending) == len(ending):
                assert matcher.consume_tokens(ending), matcher.get_error()
                token_ids += ending
                continue
            mask = next_mask(matcher, 4 * -(-self.size // 32))
            assert mask is not None, matcher.get_error()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if self.end_id in allowed and rng.random() < 0.5:
                break
            token_ids.append(int(rng.choice(allowed[allowed != self.end_id])))
            assert matcher.consume_token(token_ids[-1]), matcher.get_error()
        return b"".join(self.text_of[token_id] for token_id in token_ids).decode()

    def read(self, text):
        reader = self.reader(SCHEMAS)
        return piece_of(reader.push(text) + reader.finish())


def wanted(reader, *, preamble=None, **rules):
    tagged = reader.call_form.tagged_text(SCHEMAS, **{"is_single": False, **rules})
    return sampling_pb2.StructuredOutput(tagged=tagged, preamble=preamble)


@pytest.mark.parametrize("name", WRITTEN)
def test_demanded_calls_are_read_back_with_valid_arguments(name):
    follower = Follower(FORMATS[name])
    for seed in range(12):
        is_single = bool(seed % 2)
        text = follower.follow(wanted(FORMATS[name], is_required=True, is_single=is_single), seed)
        piece = follower.read(text)

        assert piece.calls, text
        assert len(piece.calls) == 1 or not is_single
        assert not piece.content.strip()
        for call in piece.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", [name for name in WRITTEN if FORMATS[name].call_form.trigger])
def test_calls_beside_text_follow_their_schemas(name):
    reader = FORMATS[name]
    follower, form = Follower(reader), wanted(reader, is_required=False)
    call = follower.follow(wanted(reader, is_required=True), 1)

    assert follower.accepts(form, "Just text.")
    assert follower.accepts(form, "")
    assert follower.accepts(form, f"I look. {call}")
    assert follower.read(f"I look. {call}").content == "I look."
    assert not follower.accepts(form, f"I look. {call.replace('days', 'nights')}") or (
        "days" not in call
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_reasoning_may_come_first(name):
    reader = FORMATS[name]
    follower = Follower(reader)
    begin, end = reader.preamble(is_call=True)
    call = follower.follow(wanted(reader, is_required=True, is_single=True), 3)
    optional = wanted(reader, is_required=True, preamble={"begin": begin, "end": end})
    inside = wanted(reader, is_required=True, preamble={"end": end})

    assert follower.accepts(optional, call)
    assert follower.accepts(optional, f"{begin}So. {{}}{end}{call}")
    assert follower.accepts(inside, f"So.{end}{call}")
    assert not follower.accepts(inside, call)
    piece = follower.read(f"{begin}So.{end}{call}")
    assert (piece.reasoning, piece.content.strip(), len(piece.calls)) == ("So.", "", 1)


@pytest.mark.parametrize("form", [{"regex": "[a-c]+"}, {"lark": "start: x\nx: /[a-c]+/"},
                                  {"choice": {"texts": ["abc"]}}])  # fmt: skip
def test_every_form_may_have_a_preamble(form):
    follower = Follower(FORMATS["hermes"])
    output = sampling_pb2.StructuredOutput(**form, preamble={"begin": "<think>", "end": "</think>"})

    assert follower.accepts(output, "<think>xyz</think>\n\nabc")
    assert follower.accepts(output, "abc")
    assert not follower.accepts(output, "<think>xyz</think>\n\nxyz")


@pytest.mark.parametrize(
    ("tagged", "message"),
    [
        ({}, "has 0 tags"),
        ({"tags": [{"json_schema": "{}"}] * 129}, "has 129 tags"),
        ({"tags": [{"json_schema": '{"if": {}, "then": {}}'}]}, "tag 0: json_schema has 'if'"),
        ({"tags": [{"json_schema": "[]"}]}, "tag 0: json_schema is not an object"),
        ({"tags": [{"begin": "a", "json_schema": "{}"}], "triggers": ["b"]}, "the trigger"),
    ],
)
def test_a_wrong_tagged_text_is_refused(tagged, message):
    with pytest.raises(InvalidRequestError, match=message):
        grammar_text(structured_output_of(sampling_pb2.StructuredOutput(tagged=tagged), 2**16))


def test_a_preamble_needs_an_end():
    output = sampling_pb2.StructuredOutput(regex="a", preamble={"begin": "<think>"})
    with pytest.raises(InvalidRequestError, match=r"preamble\.end"):
        structured_output_of(output, 2**16)


PAIRS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "anything"},
        "on": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["a b", "c"]},
        "code": {"type": "string", "minLength": 2, "maxLength": 3},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2},
        "either": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    },
    "required": ["on", "list"],
    "$defs": {"item": {"type": "integer"}},
}
IN_PAIRS = [name for name in WRITTEN if FORMATS[name].call_form.pairs]


def pairs_of(reader, schema):
    tagged = reader.call_form.tagged_text({"f": schema}, is_required=True, is_single=True)
    return sampling_pb2.StructuredOutput(tagged=tagged)


@pytest.mark.parametrize("name", IN_PAIRS)
def test_arguments_in_pairs_are_read_back_as_the_schema_says(name):
    follower = Follower(FORMATS[name])
    names = set()
    for seed in range(25):
        text = follower.follow(pairs_of(FORMATS[name], PAIRS), seed)
        reader = FORMATS[name]({"f": PAIRS})
        [call] = piece_of(reader.push(text) + reader.finish()).calls
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, PAIRS)
        assert list(arguments) == [each for each in PAIRS["properties"] if each in arguments]
        names |= set(arguments)
    assert names == set(PAIRS["properties"])


WRITTEN_PAIRS = {
    "gemma4": (
        '<|tool_call>call:f{text:<|"|>1 < 2\nor "</p>,<|"|>,on:true,mode:<|"|>a b<|"|>,list:[1,2],'
        'either:null}<tool_call|>',
        "<|tool_call>call:f{on:yes,list:[]}<tool_call|>",
        "<|tool_call>call:f{on:true,list:[1,2,3]}<tool_call|>",
        '<|tool_call>call:f{on:true,mode:<|"|>b<|"|>,list:[]}<tool_call|>',
        "<|tool_call>call:f{}<tool_call|>",
    ),
    "pythonic": ('[f(on=True, mode="c", list=[1])]', '[f(on=true, list=[])]', "[f(on=True)]"),
    "glm4": (
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>1 < 2\nor </arg></arg_value>\n"
        "<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n<arg_key>list</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n</tool_call>",
        "<tool_call>f\n<arg_key>on</arg_key>\n<arg_value>yes</arg_value>\n</tool_call>",
        "<tool_call>f\n</tool_call>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=text>\n1 < 2\nor </p>\n</parameter>\n"
        "<parameter=on>\ntrue\n</parameter>\n"
        "<parameter=list>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=on>\nyes\n</parameter>\n</function>\n"
        "</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=text>1 < 2\nor </p></parameter>\n"
        "<parameter=on>true</parameter>\n<parameter=list>[1, 2]</parameter>\n</function>\n"
        "</seed:tool_call>",
        "<seed:tool_call>\n<function=f>\n<parameter=on>yes</parameter>\n</function>\n"
        "</seed:tool_call>",
        "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">1 < 2\nor </p>'
        '</parameter>\n'
        '<parameter name="on">true</parameter>\n<parameter name="list">[1, 2]</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="on">yes</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    ),
    "minimax_m3": tuple(
        f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">{arguments}'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
        for arguments in (
            "]<]minimax[>[<text>1 < 2\nor </p>]<]minimax[>[</text>"
            "]<]minimax[>[<on>true]<]minimax[>[</on>]<]minimax[>[<list>"
            "]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>2]<]minimax[>[</item>"
            "]<]minimax[>[</list>",
            "]<]minimax[>[<on>true]<]minimax[>[</on>]<]minimax[>[<list>[1]]<]minimax[>[</list>",
            "]<]minimax[>[<on>true]<]minimax[>[</on>]<]minimax[>[<list>]<]minimax[>[</lst>",
            "]<]minimax[>[<on>yes]<]minimax[>[</on>]<]minimax[>[<list>]<]minimax[>[</list>",
            "",
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PAIRS)
def test_what_models_write_in_pairs_is_accepted_and_what_breaks_the_schema_is_not(name):
    follower, form = Follower(FORMATS[name]), pairs_of(FORMATS[name], PAIRS)
    right, *wrong = WRITTEN_PAIRS[name]
    assert follower.accepts(form, right)
    assert not any(follower.accepts(form, text) for text in wrong)


@pytest.mark.parametrize("name", IN_PAIRS)
def test_a_schema_without_properties_takes_any_pairs(name):
    follower = Follower(FORMATS[name])
    for seed in range(6):
        text = follower.follow(pairs_of(FORMATS[name], {}), seed)
        reader = FORMATS[name]({"f": {}})
        [call] = piece_of(reader.push(text) + reader.finish()).calls
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", IN_PAIRS)
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{}]}, "'anyOf' for all arguments"),
        ({"required": ["a"]}, "no property 'a'"),
        ({"type": "array"}, "not that of an object"),
    ],
)
def test_a_schema_that_pairs_cannot_keep_is_refused(name, schema, message):
    with pytest.raises(InvalidRequestError, match=message):
        grammar_text(structured_output_of(pairs_of(FORMATS[name], schema), 2**16))


NESTED = {
    "type": "object",
    "properties": {
        "node": {"$ref": "#/$defs/node"},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "odd name": {"type": "number", "minimum": 1, "maximum": 2},
        "o": {
            "type": "object",
            "properties": {
                "a": {"type": ["string", "null"], "maxLength": 4},
                "b": {"enum": [1, "x", "", None]},
                "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            },
            "required": ["b"],
        },
    },
    "required": ["node", "counts", "odd name", "o"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
}


@pytest.mark.parametrize(
    ("name", "named"),
    [("minimax_m3", "a>b"), ("minimax_m3", "/a"), ("minimax_m2", 'a">b'), ("seed_oss", "a>b")],
)
def test_a_name_that_would_end_its_tag_is_refused(name, named):
    form = pairs_of(FORMATS[name], {"properties": {named: {}}})
    with pytest.raises(InvalidRequestError, match="cannot write"):
        grammar_text(structured_output_of(form, 2**16))


@pytest.mark.parametrize("name", ["gemma4", "minimax_m3"])
def test_values_that_are_no_json_follow_their_schemas_at_any_depth(name):
    follower = Follower(FORMATS[name])
    for seed in range(12):
        text = follower.follow(pairs_of(FORMATS[name], NESTED), seed)
        reader = FORMATS[name]({"f": NESTED})
        [call] = piece_of(reader.push(text) + reader.finish()).calls
        jsonschema.validate(json.loads(call.arguments), NESTED)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "x"}, "'pattern', which"),
        ({"type": "array", "prefixItems": [{}]}, "'prefixItems', which"),
        ({"oneOf": [{"type": "null"}]}, "'oneOf', which"),
        ({"enum": [[1]]}, "of lists or objects"),
        ({"items": False, "type": "array"}, "a value that none can be"),
        ({"type": ["string", {}]}, "the type {}"),
        ({"type": "array", "minItems": "2"}, "number of items"),
        ({"$ref": "#/$defs/none"}, "is no definition"),
        ({"type": "object", "minProperties": 1}, "'minProperties', which"),
    ],
)
def test_what_values_with_quotes_of_their_own_cannot_keep_is_refused(schema, message):
    form = pairs_of(FORMATS["gemma4"], {"properties": {"a": {"anyOf": [schema]}}})
    with pytest.raises(InvalidRequestError, match=message):
        grammar_text(structured_output_of(form, 2**16))


@pytest.mark.parametrize("name", IN_PAIRS)
def test_pairs_of_any_names_have_values_of_their_schema(name):
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    follower = Follower(FORMATS[name])
    for seed in range(4):
        text = follower.follow(pairs_of(FORMATS[name], schema), seed)
        reader = FORMATS[name]({"f": schema})
        [call] = piece_of(reader.push(text) + reader.finish()).calls
        jsonschema.validate(json.loads(call.arguments), schema)


def test_a_bare_string_with_a_pattern_is_refused():
    schema = {"properties": {"a": {"type": "string", "pattern": "x"}}}
    with pytest.raises(InvalidRequestError, match="'pattern' for a string"):
        grammar_text(structured_output_of(pairs_of(FORMATS["glm4"], schema), 2**16))


def structural(**changes):
    tags = [
        {"begin": "<f=a>", "json_schema": '{"type": "integer"}', "end": "</f>"},
        {"begin": "<f=b>", "json_schema": '{"enum": ["x"]}', "end": "</f>"},
        {"begin": "[g]", "json_schema": '{"type": "boolean"}'},
    ]
    tagged = {"tags": tags, "triggers": ["<f=", "[g"], "has_text_between": True, **changes}
    return sampling_pb2.StructuredOutput(tagged=tagged)


def test_parts_come_anywhere_in_a_text():
    follower, form = Follower(FORMATS["plain"]), structural()
    for right in ("", "Text <f alone.", "<f=a>12</f>", 'So <f=b>"x"</f> and [g]true, <f=a>1</f>.'):
        assert follower.accepts(form, right), right
    for wrong in ("<f=c>1</f>", '<f=a>"x"</f>', "Text [g]1", "Text <f=", "<f=a>1</f> [gg"):
        assert not follower.accepts(form, wrong), wrong
    once = structural(stop_after_first=True)
    assert follower.accepts(once, "So <f=a>1</f> it is.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"triggers": []}, "takes triggers"),
        ({"separator": ","}, "no begin, separator or end"),
        ({"triggers": ["<f=", "[g", "{"]}, "no tag begins with the trigger '{'"),
        ({"triggers": ["<f="]}, "tag 2 does not begin"),
        ({"triggers": ["<f=", ""]}, "empty trigger"),
    ],
)
def test_wrong_triggers_are_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        grammar_text(structured_output_of(structural(**changes), 2**16))
