"""Byte-level BPE given by ranks, as tiktoken has it: tokens of bytes, the lower merged first."""

from collections.abc import Mapping

from models.tokenizers.errors import TokenizerFormatError, check_merges

MAX_TOKEN_BYTES = 512
"""Longer tokens are not split: merges for each of their splits would take long."""


def _spelling() -> list[str]:
    """Returns the character of each byte: itself if it can be seen, else one from U+0100 on.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", its code.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


_CHARACTERS = _spelling()


def spelled(token: bytes) -> str:
    """Returns a token's bytes as the characters that stand for them."""
    return token.decode("latin-1").translate(_CHARACTERS)


def check_bytes(ranks: Mapping[bytes, int]) -> None:
    """Checks that every text has tokens: the library drops a byte that is none, without an error.

    Raises:
        TokenizerFormatError: a byte is no token.
    """
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise TokenizerFormatError(f"the byte 0x{byte:02X} is no token")


def merges(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Returns all pairs of tokens that together are a token, the one with the lowest rank first.

    tiktoken merges the two neighbours whose bytes together have the lowest rank. So every way to
    make a token is a merge, and those of one token follow each other.

    Raises:
        TokenizerFormatError: they are too many.
    """
    found: list[tuple[int, int, int, bytes, int]] = []
    for token, rank in ranks.items():
        if len(token) > MAX_TOKEN_BYTES:
            continue
        check_merges(len(found))
        for place in range(1, len(token)):
            left, right = ranks.get(token[:place]), ranks.get(token[place:])
            if left is not None and right is not None:
                found.append((rank, left, right, token, place))
    found.sort(key=lambda each: each[:3])
    return [[spelled(token[:place]), spelled(token[place:])] for *_, token, place in found]
