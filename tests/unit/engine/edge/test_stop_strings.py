"""Stop strings in the text of tokens, wherever the tokens are cut."""

import functools

import pytest
import tokenizers

from services.engine.edge.stop_strings import FoundStop, StopRule, StopStrings
from services.engine.grammar.grammar_text import make_tokenizer
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_json

END = "<|im_end|>"


@functools.cache
def guiding_tokenizer():
    return make_tokenizer(tokenizer_json(), vocab_size=330, eos_token_ids=[])


def ids(text):
    reference: tokenizers.Tokenizer = reference_tokenizer()
    return reference.encode(text, add_special_tokens=False).ids


def strings(*texts, skip_special_tokens=True, min_tokens=0):
    rule = StopRule(texts, skip_special_tokens, min_tokens)
    return StopStrings(rule, guiding_tokenizer())


def decoded(token_ids):
    return reference_tokenizer().decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("stop", ["world", "o w", "you today? I", "é", "🙂", "one t"])
@pytest.mark.parametrize("part", [1, 3, 100])
def test_the_token_that_completes_a_string_is_found_however_they_come(stop, part):
    token_ids = ids("hello world, how are you today? I am é 🙂 one two three")
    search = strings(stop, "never")
    num_before, found = 0, None
    for start in range(0, len(token_ids), part):
        if found := search.find(token_ids[start : start + part]):
            break
        num_before += part
    assert found is not None
    assert found.text == stop
    num_tokens = num_before + found.num_tokens
    assert stop in decoded(token_ids[:num_tokens])
    assert stop not in decoded(token_ids[: num_tokens - 1])


def test_the_string_that_is_complete_first_wins_and_the_longer_of_two_that_end_together():
    found = strings("three", "two", "e two").find(ids("one two three"))
    assert found is not None
    assert found.text == "e two"


def test_special_tokens_are_text_only_where_they_are_not_skipped():
    token_ids = ids(f"hello{END}world")
    assert END in decoded(token_ids)
    assert strings(END).find(token_ids) is None
    assert strings("oworld").find(token_ids) is not None
    found = strings(END, skip_special_tokens=False).find(token_ids)
    assert found == FoundStop(END, token_ids.index(ids(END)[0]) + 1)


def test_no_string_is_looked_for_in_the_tokens_that_must_come():
    token_ids = ids("one two three one two")
    early = strings("one").find(token_ids)
    late = strings("one", min_tokens=early.num_tokens).find(token_ids)
    assert early.num_tokens < late.num_tokens
