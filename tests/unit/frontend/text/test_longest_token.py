"""No text has fewer tokens than its bytes and the longest token say."""

import json
import sys
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.frontend.text.longest_token import NFC_SHRINKS, longest_token_bytes
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.special_tokenizers import awkward_texts, byte_level, embedded, sentencepiece


def longest_of(tokenizer: Tokenizer) -> int | None:
    return longest_token_bytes(json.loads(tokenizer.to_str()))


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [embedded, byte_level, composing, sentencepiece, reference_tokenizer],
    ids=lambda make: make.__name__,
)
def test_texts_have_at_least_as_many_tokens_as_their_length_says(make):
    tokenizer = make()
    longest = longest_of(tokenizer)
    assert longest is not None
    shrinking = ["\u1fbe\u0308\u0341" * 50, "\u212a" * 50, " " * 500, "<|im_end|>" * 9]
    for text in [*awkward_texts(tokenizer), *shrinking]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) * longest >= len(text.encode())


def test_composition_shortens_no_text_more_than_is_said():
    longest: dict[str, int] = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        apart = unicodedata.normalize("NFD", character)
        if len(apart) == 1 and not "\ud800" <= character <= "\udfff":
            longest[apart] = max(longest.get(apart, 0), len(character.encode()))
    for character in map(chr, range(sys.maxunicode + 1)):
        if not "\ud800" <= character <= "\udfff":
            whole = unicodedata.normalize("NFC", character)
            apart = unicodedata.normalize("NFD", character)
            assert sum(map(longest.get, apart)) <= NFC_SHRINKS * len(whole.encode())


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def swallowing_blanks() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def dropping_blanks() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer]
    )
    return tokenizer


def without_some_byte() -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet()[1:])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_normalizer(normalizers.Strip()),
        with_normalizer(normalizers.Replace("  ", " ")),
        with_normalizer(normalizers.NFKC()),
        swallowing_blanks(),
        dropping_blanks(),
        without_some_byte(),
        Tokenizer(
            models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
        ),
        Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>")),
    ],
)
def test_a_tokenizer_that_drops_or_joins_text_says_nothing(tokenizer):
    assert longest_of(tokenizer) is None
