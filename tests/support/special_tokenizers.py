"""Small tokenizers of the common kinds; their special tokens are spelled in plain characters."""

import json
import string

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from services.engine.config.checkpoint import TINY_CHECKPOINT

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "[SEP]")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation


def embedded() -> tokenizers.Tokenizer:
    """Returns the tokenizer of the embedded model."""
    return tokenizers.Tokenizer.from_file(str(TINY_CHECKPOINT / "tokenizer.json"))


def byte_level() -> tokenizers.Tokenizer:
    """Returns a tokenizer as of GPT-2 and Llama 3; some of its added tokens are not special."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for text in ("<|", "|>", "im", "im_", "Ġb", '"}'):
        vocabulary[text] = len(vocabulary)
    merges = [("<", "|"), ("|", ">"), ("i", "m"), ("im", "_"), ("Ġ", "b"), ('"', "}")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("[EOS]", special=False)])
    return tokenizer


def sentencepiece(*, marks_special: bool = True) -> tokenizers.Tokenizer:
    """Returns a tokenizer as of Llama 2 and Gemma: spaces are U+2581, unknown characters are bytes.

    Args:
        marks_special: whether control tokens are marked as special, or only in the vocabulary.
    """
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for text in ("▁", *CHARACTERS, "▁b", "s>"):
        vocabulary.setdefault(text, len(vocabulary))
    model = models.BPE(
        vocab=vocabulary,
        merges=[("▁", "b"), ("s", ">")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if marks_special:
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<start_of_turn>", "[INST]"])
    return tokenizer


def end_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Returns the token that ends an output: the most awkward one there is."""
    for text in ("[EOS]", "</s>", "<|im_end|>"):
        if (token_id := tokenizer.token_to_id(text)) is not None:
            return token_id
    raise AssertionError("no token can end an output")


def awkward_texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Returns the texts that are spelled like a token which is added, or ends an output."""
    added = json.loads(tokenizer.to_str())["added_tokens"]
    texts = {token["content"] for token in added} | {tokenizer.id_to_token(end_token(tokenizer))}
    return sorted(texts)


KINDS = {
    "embedded": embedded,
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unmarked": lambda: sentencepiece(marks_special=False),
}
