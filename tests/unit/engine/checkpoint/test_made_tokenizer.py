"""Folders whose tokenizer is no tokenizer.json get one, or a reason."""

import base64
import itertools
import json
import math
import random

import pytest
import tokenizers

from protos.sentencepiece.v1.model_pb2 import Model, NormalizerSpec, Piece, TrainerSpec
from services.engine.checkpoint.model_files import ModelFolderError
from services.engine.checkpoint.tokenizer_files import (
    TOKENIZER_FILE_BYTES,
    TokenizerFiles,
    check_token_ids,
)
from tests.unit.models.tokenizers.test_byte_ranks import tekken_of

SPACE = "\u2581"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
OCTETS = {bytes([byte]): byte for byte in range(256)}
KIMI_ADDED = {"400": {"content": "<|im_end|>", "special": True, "lstrip": False}}


def sentencepiece(**spec) -> Model:
    """Returns a vocabulary of bytes, letters, and pairs that are merged by their scores."""
    pieces = [
        Piece(piece="<unk>", type=UNKNOWN),
        Piece(piece="<s>", type=CONTROL),
        Piece(piece="</s>", type=CONTROL),
        *(Piece(piece=f"<0x{byte:02X}>", type=BYTE) for byte in range(256)),
        Piece(piece="<|tool|>", type=USER_DEFINED),
    ]
    draws = random.Random(3)
    merged = {f"{a}{b}" for a in f"{SPACE}abc" for b in f"{SPACE}abc"}
    merged |= {a + b for a in sorted(merged) for b in "abc" if draws.random() < 0.5}
    order = draws.sample(sorted(merged), len(merged))
    pieces += [Piece(piece=text, score=-number) for number, text in enumerate(order)]
    pieces += [Piece(piece=text, score=-1000 - n) for n, text in enumerate(f"{SPACE}abcé<s>")]
    return Model(
        pieces=pieces,
        trainer_spec=TrainerSpec(model_type=2, byte_fallback=True),
        normalizer_spec=NormalizerSpec(
            **{"add_dummy_prefix": True, "remove_extra_whitespaces": False} | spec
        ),
    )


def with_pieces(*pieces: Piece) -> bytes:
    model = sentencepiece()
    model.pieces.extend(pieces)
    return model.SerializeToString()


def expected(text, model, *, has_prefix=True):
    """Merges the neighbours whose piece has the highest score until there are none."""
    ids = {each.piece: number for number, each in enumerate(model.pieces)}
    scores = {each.piece: each.score for each in model.pieces if not each.type}
    parts = list((" " + text if has_prefix and text else text).replace(" ", SPACE))
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        found = [(-scores[pair], place) for place, pair in enumerate(joined) if pair in scores]
        if not found:
            break
        place = min(found)[1]
        parts[place : place + 2] = [joined[place]]
    octets = (ids.get(part) or [ids[f"<0x{b:02X}>"] for b in part.encode()] for part in parts)
    return [i for each in octets for i in ([each] if isinstance(each, int) else each)]


def made(folder):
    files = TokenizerFiles.from_folder(folder)
    return files, tokenizers.Tokenizer.from_str(files.content("tokenizer.json").decode())


def texts():
    draws = random.Random(8)
    return ["", *("".join(draws.choices("aabbccé  東<>s", k=30)) for _ in range(200))]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_merges_by_scores(tmp_path, has_prefix):
    model = sentencepiece(add_dummy_prefix=has_prefix)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    _, library = made(tmp_path)
    for text in texts():
        ids = library.encode(text, add_special_tokens=False).ids
        if "<s>" not in text:
            assert ids == expected(text, model, has_prefix=has_prefix)
            assert library.decode(ids, skip_special_tokens=False) == text
    assert library.encode("a<|tool|>").ids[0] == 1
    assert library.encode("a<|tool|>").ids[-1] == 259


def test_sentencepiece_drops_spaces_where_it_says_so(tmp_path):
    model = sentencepiece(remove_extra_whitespaces=True)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    _, library = made(tmp_path)
    assert library.encode("  a   b ").ids == library.encode("a b").ids
    # Only spaces go: a chat template's lines end in newlines.
    assert library.decode(library.encode("\n a\n\n \t").ids) == "\n a\n\n \t"


def test_pieces_of_a_user_are_taken_whole_and_get_no_space_after_them(tmp_path):
    model = sentencepiece()
    model.pieces.extend([Piece(piece=3 * SPACE, type=USER_DEFINED), Piece(piece="|", score=-2000)])
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    _, library = made(tmp_path)
    for text, pieces in {
        "a<|tool|>b|c": ["a", "<|tool|>", "b|c"],
        "a     b": ["a", "   ", "  b"],
        "<|tool|>": ["", "<|tool|>"],
    }.items():
        ids = []
        for number, piece in enumerate(pieces):
            spelled = piece.replace(" ", SPACE)
            whole = [i for i, p in enumerate(model.pieces) if p.piece == spelled and p.type == 4]
            prefix = "" if number else " "
            ids += whole or expected(prefix + piece, model, has_prefix=False)
        assert library.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("config", "begins", "goes_on"),
    [
        ({}, True, True),
        ({"legacy": True}, True, True),
        ({"legacy": False}, True, False),
        ({"add_prefix_space": False}, False, False),
        ({"legacy": False, "add_prefix_space": False}, False, False),
    ],
)
def test_a_config_says_what_gets_a_space_in_front(tmp_path, config, begins, goes_on):
    model = sentencepiece()
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    added = {"600": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, **config})
    )
    _, library = made(tmp_path)
    ids = library.encode("ab<|im_end|>ab", add_special_tokens=False).ids
    first, last = (expected("ab", model, has_prefix=each) for each in (begins, goes_on))
    assert ids == [*first, 600, *last]
    assert library.decode(ids) in ("ab ab", "abab")


def test_what_tokenizer_config_adds_counts_more(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece().SerializeToString())
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": {
            "600": {"content": "<|im_end|>", "special": True},
            "2": {"content": "</s>", "special": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files, library = made(tmp_path)
    assert library.encode("<|im_end|>").ids == [600, 2]
    assert library.decode([2]) == "</s>"
    assert json.loads(files.content("tokenizer_config.json")) == config


def test_tekken_gets_a_config_where_there_is_none(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken_of(OCTETS)))
    files, library = made(tmp_path)
    assert [file.name for file in files.files] == ["tokenizer.json", "tokenizer_config.json"]
    assert json.loads(files.content("tokenizer_config.json"))["eos_token"] == "</s>"
    assert library.encode("ab").ids == [1, 20 + ord("a"), 20 + ord("b")]
    assert files.sha256 == TokenizerFiles.from_folder(tmp_path).sha256


def test_kimis_special_tokens_come_from_its_config(tmp_path):
    lines = b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in OCTETS.items())
    (tmp_path / "tiktoken.model").write_bytes(lines)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": KIMI_ADDED})
    )
    _, library = made(tmp_path)
    assert library.encode("a<|im_end|>").ids == [ord("a"), 400]


def test_tokenizer_json_comes_first(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tekken.json").write_text("damaged")
    assert TokenizerFiles.from_folder(tmp_path).content("tokenizer.json") == b"{}"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tekken.json", b"[", "tekken.json: it cannot be read"),
        ("tiktoken.model", b"YQ==", "line 1 is no token and rank"),
        ("tokenizer.model", b"YQ== 0\n", "no SentencePiece model"),
        ("tokenizer.model", b"", "no SentencePiece model"),
        (
            "tokenizer.model",
            Model(pieces=[Piece(piece="a")]).SerializeToString(),
            "not one of byte pairs",
        ),
        *(
            ("tokenizer.model", with_pieces(*pieces), reason)
            for pieces, reason in (
                ([Piece(piece="cab", score=math.nan)], "score is no number"),
                ([Piece(piece="caab"), Piece(piece="caab")], "a piece comes twice"),
            )
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFolderError, match=reason):
        TokenizerFiles.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "[",
        "[]",
        '{"added_tokens_decoder": {"x": {}}}',
        '{"added_tokens_decoder": 5}',
        '{"added_tokens_decoder": {"300": {"content": 5}}}',
        '{"added_tokens_decoder": {"300": {"content": []}}}',
        '{"added_tokens_decoder": {"300": {"content": "x", "special": "yes"}}}',
        '{"added_tokens_decoder": {"300": {"content": "x", "lstrip": null}}}',
    ],
)
def test_a_damaged_config_beside_ranks_is_refused(tmp_path, config):
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelFolderError, match="tokenizer_config"):
        TokenizerFiles.from_folder(tmp_path)


def test_a_file_whose_tokenizer_json_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken_of(OCTETS)))
    monkeypatch.setitem(TOKENIZER_FILE_BYTES, "tokenizer.json", 999)
    with pytest.raises(ModelFolderError, match="made of its tokenizer has"):
        TokenizerFiles.from_folder(tmp_path)


def test_a_made_tokens_id_out_of_range_names_no_file_that_is_not_there(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece().SerializeToString())
    config = {"added_tokens_decoder": {"-3": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = TokenizerFiles.from_folder(tmp_path)
    with pytest.raises(ModelFolderError, match=r"^the tokenizer of .*: a token has the id -3"):
        check_token_ids(files, tmp_path, 1000)


def test_links_out_of_the_folder_and_large_files_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "tekken.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFolderError, match="leads out"):
        TokenizerFiles.from_folder(folder)
    (folder / "tekken.json").unlink()
    with (folder / "tiktoken.model").open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(ModelFolderError, match=r"tiktoken\.model"):
        TokenizerFiles.from_folder(folder)
