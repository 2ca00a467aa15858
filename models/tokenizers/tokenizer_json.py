"""Parts of tokenizer.json, as the library `tokenizers` reads it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Parts: TypeAlias = Mapping[str, Any]
"""Some of `normalizer`, `pre_tokenizer`, `post_processor`, `decoder` and `model`."""


def tokenizer_json(parts: Parts, added_tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the whole content; parts that are missing do nothing.

    Added tokens are in the vocabulary too: the library gives others the next free ids.
    """
    parts["model"]["vocab"].update((each["content"], each["id"]) for each in added_tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        **parts,
    }


def added_token(token_id: int, text: str, *, is_special: bool) -> dict[str, Any]:
    """Returns an entry of `added_tokens`: a text that is one token wherever it is."""
    return {
        "id": token_id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def byte_level_parts(
    pre_tokenizer: Parts,
    vocabulary: dict[str, int],
    merges: Sequence[Sequence[str]],
    *,
    takes_whole: bool,
    normalizer: str | None = None,
) -> dict[str, Any]:
    """Returns the parts of byte-level BPE.

    Args:
        pre_tokenizer: splits a text, and spells bytes as characters.
        vocabulary: the ids of tokens in that spelling.
        merges: pairs of tokens, the first to be merged first.
        takes_whole: whether a piece that is a token is taken without merges.
        normalizer: the kind of the one before all else.
    """
    octets = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "normalizer": None if normalizer is None else {"type": normalizer},
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {**octets, "trim_offsets": False},
        "decoder": {**octets, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": takes_whole,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def ends_added(
    first: tuple[int, str] | None, last: tuple[int, str] | None
) -> dict[str, Any] | None:
    """Returns the post_processor that puts tokens around a text; None if there are none.

    first, last: id and text of the token that begins and of the one that ends a text.
    """
    if first is None and last is None:
        return None

    def around(part: str, type_id: int) -> list[dict[str, Any]]:
        begin, end = (
            [] if each is None else [{"SpecialToken": {"id": each[1], "type_id": type_id}}]
            for each in (first, last)
        )
        return [*begin, {"Sequence": {"id": part, "type_id": type_id}}, *end]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for token_id, text in filter(None, (first, last))
        },
    }
