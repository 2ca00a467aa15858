"""The bytes of each token, as the decoder in tokenizer.json would join them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownDecoderError(Exception):
    """The decoder is of an unsupported kind; the message names it."""


def token_bytes(tokens: Sequence[str], decoder: Any) -> list[bytes]:
    """Returns the bytes of each token.

    Args:
        tokens: in the vocabulary's spelling; empty where there is none.
        decoder: as in tokenizer.json; None where it has none.

    Raises:
        UnknownDecoderError: the decoder is not supported.
    """
    steps = _flatten(decoder)
    kinds = {step["type"] for step in steps}
    if not kinds:
        # Without a decoder, tokenizers joins tokens by spaces.
        return [f" {token}".encode() if token else b"" for token in tokens]
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return [_from_byte_level(token, alphabet) for token in tokens]
    if "ByteFallback" in kinds:
        return [_from_sentencepiece(token) for token in tokens]
    if "Metaspace" in kinds or any(_replaces_spaces(step) for step in steps):
        return [_with_spaces(token) for token in tokens]
    raise UnknownDecoderError(
        f"the decoder {sorted(kinds)}; ByteLevel, ByteFallback, Metaspace, a Replace of U+2581, and"
        " none are supported"
    )


def _flatten(decoder: Any) -> list[Any]:
    """Returns the steps of a decoder in tokenizer.json."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _replaces_spaces(step: Mapping[str, object]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": "\u2581"}


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character in byte-level BPE.

    Source: Radford et al. 2019 (GPT-2): printable Latin-1 characters represent themselves, other
    bytes map in order to characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet


def _from_byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token in literal form
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(token)
    return _with_spaces(token) if byte is None else bytes.fromhex(byte[1])


def _with_spaces(token: str) -> bytes:
    return token.replace("\u2581", " ").encode()
