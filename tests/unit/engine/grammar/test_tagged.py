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
        while not matcher.is_stopped():
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
        ({"tags": [{"json_schema": '{"if": {}}'}]}, "tag 0: json_schema has 'if'"),
        ({"tags": [{"json_schema": "[]"}]}, "tag 0: json_schema is not an object"),
        ({"tags": [{"begin": "a", "json_schema": "{}"}], "trigger": "b"}, "the trigger"),
    ],
)
def test_a_wrong_tagged_text_is_refused(tagged, message):
    with pytest.raises(InvalidRequestError, match=message):
        grammar_text(structured_output_of(sampling_pb2.StructuredOutput(tagged=tagged), 2**16))


def test_a_preamble_needs_an_end():
    output = sampling_pb2.StructuredOutput(regex="a", preamble={"begin": "<think>"})
    with pytest.raises(InvalidRequestError, match=r"preamble\.end"):
        structured_output_of(output, 2**16)
