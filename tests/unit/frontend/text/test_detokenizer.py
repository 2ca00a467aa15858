"""Text appears whole, however its bytes are spread over tokens."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files

TOKENIZER = Tokenizer(tokenizer_files())
HIDDEN = TOKENIZER.token_bytes(show_special_tokens=False)
token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)
UNFINISHED = "\ufffd"


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def run(ids: list[int], cuts: list[int], *, show_special_tokens: bool = False) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER.token_bytes(show_special_tokens=show_special_tokens))
    return [detokenizer.push(chunk) for chunk in chunked(ids, cuts)] + [detokenizer.flush()]


@given(ids=token_ids, cuts=st.lists(st.integers(0, 60)), shown=st.booleans())
def test_random_tokens_give_what_decoding_them_at_once_gives(ids, cuts, shown):
    pieces = run(ids, cuts, show_special_tokens=shown)
    expected = reference_tokenizer().decode(ids, skip_special_tokens=not shown)
    assert "".join(pieces) == expected


@given(text=st.text(max_size=40))
def test_valid_text_never_shows_a_broken_character(text):
    ids = reference_tokenizer().encode(text).ids
    pieces = run(ids, list(range(len(ids))))
    assert "".join(pieces) == text
    assert sum(piece.count(UNFINISHED) for piece in pieces) == text.count(UNFINISHED)


def test_half_a_character_shows_as_a_replacement_only_at_the_end():
    ids = reference_tokenizer().encode("\N{HUGGING FACE}").ids
    detokenizer = Detokenizer(HIDDEN)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.flush() == UNFINISHED


def test_output_finishes_a_character_that_the_prompt_began():
    ids = reference_tokenizer().encode("\N{HUGGING FACE}").ids
    detokenizer = Detokenizer(HIDDEN, [0, *ids[:2]])
    assert detokenizer.push(ids[2:]) == "\N{HUGGING FACE}"


def test_ids_beyond_the_tokenizer_have_no_text():
    padded = Tokenizer(tokenizer_files(), vocab_size=1000)
    assert padded.vocab_size == 1000
    assert Detokenizer(padded.token_bytes(show_special_tokens=True)).push([999]) == ""
