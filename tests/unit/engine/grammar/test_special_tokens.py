"""Outputs whose text is spelled like a special token are text, with every kind of tokenizer."""

import json
import re

import numpy as np
import pytest

from services.engine.grammar.constraint import next_mask
from services.engine.grammar.grammar_text import compile_grammar, grammar_text, make_tokenizer
from services.engine.structured_output import GrammarKind, StructuredOutput
from services.frontend.text.tokenizer import Tokenizer
from tests.support.special_tokenizers import KINDS, awkward_texts, end_token

CASES = [(kind, text) for kind, make in KINDS.items() for text in awkward_texts(make())]


class Outputs:
    """Follows grammars over one tokenizer, and reads what comes as the frontend does."""

    def __init__(self, tokenizer):
        self.content = tokenizer.to_str()
        self.end_id = end_token(tokenizer)
        self.size = tokenizer.get_vocab_size()
        self.grammars = make_tokenizer(
            self.content, vocab_size=self.size, eos_token_ids=[self.end_id]
        )
        self.text_of = Tokenizer({"tokenizer.json": self.content.encode()}).token_bytes(
            show_special_tokens=False
        )

    def follow(self, kind, *texts, seed=0):
        """Takes allowed tokens by chance to the end; returns the text that a client sees."""
        rng = np.random.default_rng(seed)
        grammar = grammar_text(StructuredOutput(kind, texts))
        matcher = compile_grammar(self.grammars, grammar)
        token_ids = []
        while not matcher.is_stopped():
            mask = next_mask(matcher, 4 * -(-self.size // 32))
            assert mask is not None, matcher.get_error()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if self.end_id in allowed:
                break
            token_ids.append(int(rng.choice(allowed)))
            assert matcher.consume_token(token_ids[-1]), matcher.get_error()
        return b"".join(self.text_of[token_id] for token_id in token_ids).decode()


@pytest.fixture(scope="module")
def outputs():
    return {kind: Outputs(make()) for kind, make in KINDS.items()}


@pytest.mark.parametrize("form", ["{}", "a {} b", "{0}{0}"])
@pytest.mark.parametrize(("kind", "special"), CASES)
def test_text_that_is_spelled_like_a_special_token_comes_as_text(outputs, kind, special, form):
    text = form.format(special)
    follow = outputs[kind].follow
    assert follow(GrammarKind.CHOICE, text) == text
    assert follow(GrammarKind.CHOICE, text, f"{text}!") in (text, f"{text}!")
    assert follow(GrammarKind.REGEX, re.escape(text)) == text
    assert follow(GrammarKind.LARK, f"start: {json.dumps(text)} word\nword: /[x]/") == f"{text}x"
    schema = {
        "type": "object",
        "properties": {text: {"enum": [text]}, "c": {"const": text}},
        "required": [text, "c"],
        "additionalProperties": False,
    }
    assert json.loads(follow(GrammarKind.JSON_SCHEMA, json.dumps(schema))) == {
        text: text,
        "c": text,
    }


def test_a_lark_grammar_may_name_a_special_token(outputs):
    assert outputs["embedded"].follow(GrammarKind.LARK, 'start: "a" <|im_start|> "b"') == "ab"
