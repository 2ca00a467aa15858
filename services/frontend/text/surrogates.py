"""Halves of surrogate pairs, which JSON's escapes can write and UTF-8 cannot hold."""

import re

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(
    rb"\\(?:u(?:[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|[dD][c-fC-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF_LENGTH = len(rb"\ud800")


def without_halves(text: str) -> str:
    """Returns text with U+FFFD for each half of a surrogate pair."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def without_escaped_halves(json_text: bytes) -> bytes:
    """Returns JSON with U+FFFD for each escape of half a surrogate pair."""
    return _ESCAPED_HALF.sub(_whole_escape, json_text)


def _whole_escape(match: re.Match[bytes]) -> bytes:
    is_half = len(match[0]) == _HALF_LENGTH
    return rb"\ufffd" if is_half else match[0]
