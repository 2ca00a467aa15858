"""Finds the most bytes of text that one token can stand for."""

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

NFC_SHRINKS = 4
"""Most bytes of text for one byte of its composed form: U+1FBE U+0308 U+0341 are 7 for 2."""
_MARK_BYTES = 3
"""Bytes of the character that stands for a blank of one byte in many vocabularies."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}
"""Pre-tokenizers that drop no character."""


def longest_token_bytes(parts: Mapping[str, Any]) -> int | None:
    """Returns the most UTF-8 bytes of text that one token can stand for.

    Args:
        parts: the content of a tokenizer.json.

    Returns:
        The limit; None if the tokenizer may drop characters, or join any number of them in one
        token: then the length of a text says nothing of its tokens.
    """
    normalizers = _parts_of(parts.get("normalizer"), "normalizers")
    pre_tokenizers = _parts_of(parts.get("pre_tokenizer"), "pretokenizers")
    model, added = parts.get("model") or {}, parts.get("added_tokens") or []
    if not (
        all(map(_keeps_length, normalizers))
        and all(map(_keeps_text, pre_tokenizers))
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
        and _knows_all_bytes(model, pre_tokenizers)
    ):
        return None
    is_byte_level = any(each["type"] == "ByteLevel" for each in pre_tokenizers)
    longest = max(len(token) if is_byte_level else len(token.encode()) for token in model["vocab"])
    growth = _MARK_BYTES if normalizers else 1
    longest = max(longest, *(growth * len(token["content"].encode()) for token in added), 1)
    return longest * (NFC_SHRINKS if any(each["type"] == "NFC" for each in normalizers) else 1)


def _parts_of(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [each for inner in part[name] for each in _parts_of(inner, name)]
    return [part]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes texts shorter only as NFC does."""
    if normalizer["type"] == "Replace":
        found = normalizer["pattern"].get("String")
        return found is not None and len(found.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in ("NFC", "Prepend")


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer.get("behavior") != "Removed")
    return pre_tokenizer["type"] in _KEEPING


def _knows_all_bytes(model: Mapping[str, Any], pre_tokenizers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every text becomes tokens of the vocabulary, so that none is unknown or dropped."""
    if model.get("type") != "BPE":
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if any(each["type"] == "ByteLevel" for each in pre_tokenizers):
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return all(letter in model["vocab"] for letter in letters)
    return bool(model.get("byte_fallback")) and all(
        f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)
    )
