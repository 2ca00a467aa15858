"""Text becomes the tokens that the tokenizer's own library makes of it."""

import json

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as LibraryTokenizer

from services.frontend.text.library_errors import EncodingError
from services.frontend.text.token_bytes import token_bytes
from services.frontend.text.tokenizer import (
    MAX_TOKEN_IDS,
    Tokenizer,
    TokenizerFilesError,
)
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files, tokenizer_json


def sentencepiece_files() -> dict[str, bytes]:
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>")])
    return {"tokenizer.json": tokenizer.to_str().encode()}


@pytest.mark.parametrize("repeat", [1, 2048])
async def test_short_and_long_texts_become_the_same_tokens_as_in_the_library(repeat):
    text = "hello <|im_end|> w\u00f6rld " * repeat
    encoded = Tokenizer(tokenizer_files()).encode(text, add_special_tokens=True)
    assert encoded == reference_tokenizer().encode(text).ids


async def test_special_tokens_in_a_text_are_recognised():
    ids = Tokenizer(tokenizer_files()).encode("<|im_end|>", add_special_tokens=False)
    assert ids == [1]


async def test_special_tokens_are_hidden_on_wish():
    tokenizer = Tokenizer(tokenizer_files())
    ids = [1, *reference_tokenizer().encode("hello").ids]
    assert tokenizer.decode(ids, show_special_tokens=False) == "hello"
    assert tokenizer.decode(ids, show_special_tokens=True) == "<|im_end|>hello"


async def test_many_tokens_become_the_text_that_few_do():
    tokenizer = Tokenizer(tokenizer_files())
    ids = reference_tokenizer().encode("hello \u00e9 ").ids
    repeat = 1000
    text = tokenizer.decode(ids * repeat, show_special_tokens=False)
    assert text == "hello \u00e9 " * repeat


def test_each_token_has_a_text_of_its_own():
    tokenizer = Tokenizer(tokenizer_files())
    ids = reference_tokenizer().encode("\u00e9").ids
    assert tokenizer.token_texts([*ids, 1]) == ["\ufffd"] * len(ids) + ["<|im_end|>"]


def test_sentencepiece_vocabularies_are_read_too():
    tokenizer = Tokenizer(sentencepiece_files())
    shown = tokenizer.token_bytes(show_special_tokens=True)
    assert b"".join(shown[token_id] for token_id in (1, 2, 3, 4)).decode() == " Hello world\u00e9"
    assert tokenizer.token_bytes(show_special_tokens=False)[5] == b""


def word_files(decoder) -> dict[str, bytes]:
    vocab = {"[UNK]": 0, "\u2581big": 1, "cat": 2, "<0x41>": 3}
    tokenizer = LibraryTokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    return {"tokenizer.json": tokenizer.to_str().encode()}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Replace("\u2581", " "),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]),
        decoders.Metaspace(prepend_scheme="never"),
    ],
)
async def test_bytes_of_tokens_are_joined_as_by_the_decoder(decoder):
    tokenizer = Tokenizer(word_files(decoder))
    shown = tokenizer.token_bytes(show_special_tokens=True)
    ids = [2, 1, 3, 2]
    joined = b"".join(shown[token_id] for token_id in ids).decode()
    text = tokenizer.decode(ids, show_special_tokens=True)
    # Without a decoder words are joined by spaces; a reply's first one comes after a prompt.
    assert joined == (f" {text}" if decoder is None else text)


def test_files_without_a_tokenizer_are_refused():
    with pytest.raises(TokenizerFilesError, match=r"no tokenizer\.json"):
        Tokenizer({})


def test_a_broken_tokenizer_is_refused():
    with pytest.raises(TokenizerFilesError, match="cannot be read"):
        Tokenizer({"tokenizer.json": b"{}"})


def test_a_decoder_of_another_kind_is_refused_by_name():
    content = json.loads(tokenizer_files()["tokenizer.json"])
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(TokenizerFilesError, match="WordPiece"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()})


def test_token_ids_beyond_any_vocabulary_are_refused_before_tables_are_made():
    with pytest.raises(TokenizerFilesError, match=f"the limit is {MAX_TOKEN_IDS} ids"):
        Tokenizer(tokenizer_files(), vocab_size=2**40)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "cannot be read"),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "absent", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
            "cannot be used",
        ),
        (
            "post_processor",
            {"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 4_000_000]},
            "adds the token id 4000000",
        ),
    ],
)
def test_a_tokenizer_on_which_the_library_panics_is_refused(part, value, reason):
    content = json.loads(tokenizer_files()["tokenizer.json"]) | {part: value}
    with pytest.raises(TokenizerFilesError, match=reason):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()})


@pytest.mark.parametrize("parse_special_tokens", [True, False])
async def test_a_text_that_the_library_cannot_encode_is_refused(parse_special_tokens):
    library = LibraryTokenizer(models.WordLevel(vocab={"a": 0}, unk_token="<unk>"))
    tokenizer = Tokenizer({"tokenizer.json": library.to_str().encode()})
    with pytest.raises(EncodingError, match=r"cannot encode the text: .*UNK"):
        tokenizer.encode("b", add_special_tokens=True, parse_special_tokens=parse_special_tokens)


def test_pieces_that_only_look_like_bytes_are_text():
    pieces = ["<0xZZ>", "<0x 1>", "<0xe9>"]
    assert token_bytes(pieces, {"type": "ByteFallback"}) == [b"<0xZZ>", b"<0x 1>", b"\xe9"]


def test_the_token_of_an_image_is_special_whatever_the_files_say():
    library = LibraryTokenizer.from_str(tokenizer_json())
    library.add_tokens([AddedToken("<picture>", special=False)])
    files = {"tokenizer.json": library.to_str().encode()}
    token_id = library.token_to_id("<picture>")
    assert not Tokenizer(files).is_special(token_id)
    tokenizer = Tokenizer(files, image_token_ids=[token_id])
    assert tokenizer.is_special(token_id)
    assert "<picture>" in tokenizer.special_tokens
    assert not Tokenizer(files, image_token_ids=[5]).is_special(5)
