"""Tokenizers made of ranks give the tokens of merging bytes by rank, one pair after the other."""

import base64
import itertools
import json
import random

import pytest
import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from models.tokenizers import errors
from models.tokenizers.byte_ranks import MAX_TOKEN_BYTES, merges, spelled
from models.tokenizers.errors import TokenizerFormatError
from models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from models.tokenizers.tekken import read_tekken
from models.tokenizers.tiktoken import read_tiktoken
from models.tokenizers.tokenizer_json import added_token

CORPUS = [
    "Hello world, it's 2026 and we've 12345 things to do!\n\n  Indented, indented.",
    "naïve café 東京 1234567, banana bandana; aaaa aaaaaaa",
] * 4
NUM_SPECIAL = 20
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def ranks():
    """Bytes and what a corpus merges most."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [spelled(bytes([byte])) for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, limit_alphabet=256, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    octets = {character: byte for byte, character in enumerate(alphabet)}
    vocabulary = library.get_vocab()
    by_rank = sorted(vocabulary, key=lambda text: (len(text) > 1, vocabulary[text]))
    return {bytes(octets[each] for each in text): rank for rank, text in enumerate(by_rank)}


def texts():
    draws = random.Random(5)
    letters = "abn aé東1 2'\n\t,!東京"
    return [
        "",
        *CORPUS,
        *("".join(draws.choices(letters, k=40)) for _ in range(300)),
        "WE'VE 中文English混合 1234567\r\n",
    ]


def merged(piece: bytes, ranks) -> list[int]:
    """Merges the neighbours with the lowest rank together until there are none."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        found = [
            (ranks[pair], place)
            for place, pair in enumerate(a + b for a, b in itertools.pairwise(parts))
            if pair in ranks
        ]
        if not found:
            return [ranks[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def expected(text, pattern, ranks):
    pieces = [piece.encode() for piece in regex.findall(pattern, text, regex.VERSION1)]
    assert b"".join(pieces) == text.encode()
    ids = [[ranks[p]] if p in ranks else merged(p, ranks) for p in pieces]
    return [each for piece in ids for each in piece]


def tekken_of(ranks, **config):
    vocab = [{"rank": r, "token_bytes": base64.b64encode(t).decode()} for t, r in ranks.items()]
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    return {
        "config": {
            "pattern": PATTERN,
            "default_num_special_tokens": NUM_SPECIAL,
            "default_vocab_size": NUM_SPECIAL + len(ranks),
            **config,
        },
        "vocab": vocab,
        "special_tokens": [{"rank": r, "token_str": t} for r, t in enumerate(special)],
    }


def library_of(content):
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def test_tekken_splits_and_merges_as_its_file_says(ranks):
    library = library_of(read_tekken(json.dumps(tekken_of(ranks)).encode()))
    for text in texts():
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == [NUM_SPECIAL + rank for rank in expected(text, PATTERN, ranks)]
        assert library.decode(ids) == text
    assert library.encode("[INST] a").ids[:2] == [1, 3]
    assert library.id_to_token(19) == "<SPECIAL_19>"


def test_tokens_beyond_the_models_vocabulary_are_left_out(ranks):
    content = tekken_of(ranks, default_vocab_size=NUM_SPECIAL + 300)
    library = library_of(read_tekken(json.dumps(content).encode()))
    assert library.get_vocab_size() == NUM_SPECIAL + 300
    few = {token: rank for token, rank in ranks.items() if rank < 300}
    for text in texts():
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == [NUM_SPECIAL + rank for rank in expected(text, PATTERN, few)]


def test_kimis_ranks_with_special_tokens_far_after_them(ranks):
    lines = b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items())
    added = [added_token(1000, "[BOS]", is_special=True)]
    library = library_of(read_tiktoken(lines, added))
    [pattern] = PRE_TOKENIZERS["kimi-k2"].expressions
    for text in texts():
        ids = library.encode(text).ids
        assert ids == expected(text, pattern, ranks)
        assert library.decode(ids) == text
    assert library.encode("[BOS]").ids == [1000]


def test_kimis_words_are_split_from_chinese_ones():
    [pattern] = PRE_TOKENIZERS["kimi-k2"].expressions
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for text, pieces in {
        "中文English混合": ["中文", "English", "混合"],
        "北京市 Pascal": ["北京市", " Pascal"],
        "they'LL 1234567": ["they'LL", " ", "123", "456", "7"],
    }.items():
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_very_long_tokens_are_not_split():
    long = b"ab" * MAX_TOKEN_BYTES
    assert merges({b"a": 0, b"b": 1, b"ab": 2, long[:-1]: 3, long: 4}) == [["a", "b"]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab": [{"token_bytes": "?"}]}, "cannot be read"),
        ({"vocab": 5}, "cannot be read"),
        ({"vocab": [{"rank": 0, "token_bytes": "YQ=="}]}, "0x00 is no token"),
        ({"vocab": [{"rank": 1, "token_bytes": "YQ=="}]}, "order of their ranks"),
        ({"vocab": [{"rank": r, "token_bytes": "YQ=="} for r in (0, 1)]}, "come twice"),
        ({"config": {"pattern": "a"}}, "no 'default_num_special_tokens'"),
        ({"config": {"pattern": 1}}, "pattern"),
        ({"config": {"default_num_special_tokens": 10**9}}, "cannot be special"),
        ({"config": {"default_num_special_tokens": 0}}, "cannot be special"),
        ({"config": {"default_vocab_size": "many"}}, "integers"),
        ({"special_tokens": [{"rank": 20, "token_str": "<s>"}]}, "rank 20"),
    ],
)
def test_damaged_tekken_files_are_refused(ranks, change, reason):
    content = tekken_of(ranks)
    if change.get("config") == {"pattern": "a"}:
        content["config"] = change["config"]
    else:
        content["config"] |= change.get("config", {})
        content |= {name: value for name, value in change.items() if name != "config"}
    with pytest.raises(TokenizerFormatError, match=reason):
        read_tekken(json.dumps(content).encode())


@pytest.mark.parametrize(
    "content",
    [b"YQ== 0\nYg==\n", b"YQ== x\n", b"? 0\n", b"YQ== 0\nYQ== 1\n", b"YQ== 0\nYg== 0\n"],
)
def test_damaged_ranks_are_refused(content):
    with pytest.raises(TokenizerFormatError):
        read_tiktoken(content, [])


def test_a_byte_without_a_token_is_refused(ranks):
    few = {token: rank for token, rank in ranks.items() if token != b"q"}
    lines = b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in few.items())
    with pytest.raises(TokenizerFormatError, match="the byte 0x71 is no token"):
        read_tiktoken(lines, [])


def test_too_many_merges_are_refused(ranks, monkeypatch):
    monkeypatch.setattr(errors, "MAX_MERGES", 20)
    with pytest.raises(TokenizerFormatError, match="more than 20 pairs"):
        merges(ranks)
