"""Tokenizers of GGUF files encode as the ones that they were made from."""

import json

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from models.gguf.errors import GgufError
from models.gguf.model import GgufModel
from models.gguf.tokenizer import GgufTokenizer, generation_config
from models.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from services.frontend.text.template_source import find_template
from services.frontend.text.tokenizer import Tokenizer

CORPUS = [
    "Hello world, it's 2026 and we've 12345 things to do!\n\n  Indented.",
    "naïve café 東京 1234567",
] * 4
TEXTS = [
    "",
    "Hello world",
    " it's 12345, isn't it?\n\n\n  yes  ",
    "WE'VE 1234567 naïve cafés in 東京…",
    "<|im_start|>user\nhi<|im_end|>",
    "a\tb \u00a0 c\r\n",
]


def opened(tmp_path, fields):
    return GgufTokenizer.read(GgufModel(tmp_path / "model.gguf", fields, {}))


def library(gguf):
    return tokenizers.Tokenizer.from_str(json.dumps(gguf.tokenizer_json()))


def files_of(gguf):
    return gguf.tokenizer_json(), gguf.config_json()


def trained(pre_tokenizer):
    """Returns a tokenizer of the library with a small vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def fields_of(tokenizer, pre):
    parts = json.loads(tokenizer.to_str())
    vocabulary = parts["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in parts["added_tokens"]}
    merges = parts["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": vocabulary["<|im_start|>"],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


OCTETS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {
    "gpt-2": GPT_2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), OCTETS]
    ),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA_3.replace("{1,3}", "")), "isolated"), OCTETS]
    ),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_texts_have_the_ids_of_the_original(pre, tmp_path):
    original = trained(ORIGINALS[pre])
    ours = library(opened(tmp_path, fields_of(original, pre)))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_splits_are_those_that_transformers_has(pre):
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    [expression] = PRE_TOKENIZERS[pre].expressions
    split, theirs = (
        pre_tokenizers.Split(Regex(each), "isolated")
        for each in (expression, mapping.GGUF_PRE_TOKENIZER_SPLITS[pre])
    )
    for text in [*TEXTS, *CORPUS, "HelloWorld don'T x/y//\n/ ∑ÀÉ e\u0301"]:
        assert split.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_frontends_take_every_kind(pre, tmp_path):
    gguf = opened(tmp_path, fields_of(trained(GPT_2), pre))
    content = json.dumps(gguf.tokenizer_json()).encode()
    tokenizer = Tokenizer({"tokenizer.json": content})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = tokenizer.token_bytes(show_special_tokens=True)
        assert b"".join(shown[each] for each in ids).decode() == text


def test_begin_and_end_are_added_as_the_file_says(tmp_path):
    fields = fields_of(trained(GPT_2), "gpt-2")
    begin, end = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    ids = library(opened(tmp_path, fields | flags)).encode("Hello").ids
    assert (ids[0], ids[-1]) == (begin, end)
    assert begin not in library(opened(tmp_path, fields)).encode("Hello").ids


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{octet:02X}>" for octet in range(256)),
        "▁", "h", "e", "l", "o", "he", "ll", "llo", "hello", "▁hello", "▁h", "  ",
    ],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip
SENTENCEPIECE["tokenizer.ggml.scores"] = [
    -float(place) for place in range(len(SENTENCEPIECE["tokenizer.ggml.tokens"]))
]
SENTENCEPIECE["tokenizer.ggml.token_type"] = [2, 3, 3, *([6] * 256), *([1] * 11), 4]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["<s>", "▁hello"]),
        ("hello hello", ["<s>", "▁hello", "▁hello"]),
        ("lol", ["<s>", "▁", "l", "o", "l"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_merges_by_score(text, pieces, tmp_path):
    ours = library(opened(tmp_path, SENTENCEPIECE))
    encoding = ours.encode(text)
    assert encoding.tokens == pieces
    assert ours.decode(encoding.ids) == text


def test_gemma_has_no_prefix_and_merges_runs_of_spaces(tmp_path):
    fields = SENTENCEPIECE | {
        "general.architecture": "gemma3",
        "tokenizer.ggml.add_space_prefix": False,
    }
    ours = library(opened(tmp_path, fields))
    assert ours.encode("hello  hello").tokens[1] == "hello"
    assert "▁▁" in ours.encode("  ").tokens


def test_turns_end_by_tokens_that_the_file_does_not_list(tmp_path):
    fields = fields_of(trained(GPT_2), "gpt-2")
    fields["tokenizer.ggml.eos_token_id"] = fields["tokenizer.ggml.tokens"].index("<|endoftext|>")
    gguf = opened(tmp_path, fields)
    ends = {gguf.tokens[each] for each in generation_config(gguf)["eos_token_id"]}
    assert ends == {"<|endoftext|>", "<|im_end|>"}


def test_chat_templates_go_where_frontends_look(tmp_path):
    fields = fields_of(trained(GPT_2), "gpt-2") | {
        "tokenizer.chat_template": "plain {{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    config = json.dumps(opened(tmp_path, fields).config_json()).encode()
    template = find_template({"tokenizer_config.json": config})
    assert template.text == "plain {{ eos_token }}"
    assert template.tool_text == "with tools"
    assert template.variables["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.tokens": None}, "tokens is no list"),
        ({"tokenizer.ggml.merges": [1]}, "merges is no list"),
        ({"tokenizer.ggml.token_type": [1]}, "have 1 types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_what_is_not_supported_is_named(changes, reason, tmp_path):
    fields = fields_of(trained(GPT_2), "gpt-2") | changes
    with pytest.raises(GgufError, match=reason):
        files_of(opened(tmp_path, fields))
