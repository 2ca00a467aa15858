"""Reads data URLs."""

import binascii
import re

from services.frontend.errors import InvalidRequestError

_PREFIX = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,\s]{0,256})*)(;base64)?,", re.I)
_MAX_PREFIX = 1024
_SPACE = str.maketrans("", "", " \t\r\n")


def is_data_url(url: str) -> bool:
    """Whether a URL has its data in itself."""
    return url[:5].lower() == "data:"


def from_data_url(url: str, *, max_bytes: int) -> bytes:
    """Returns the bytes of an image in a data URL.

    Raises:
        InvalidRequestError: it is no base64 data URL of an image, or has too many bytes.
    """
    prefix = _PREFIX.match(url[:_MAX_PREFIX])
    if prefix is None:
        raise InvalidRequestError("the image's data URL is not data:image/...;base64,...")
    media_type = prefix[1] or "text/plain"
    if not media_type.lower().startswith("image/"):
        raise InvalidRequestError(f"the data URL has {media_type[:100]!r} instead of an image")
    if prefix[3] is None:
        raise InvalidRequestError("the image's data URL is not in base64")
    # Four characters are three bytes, and line ends are a few more characters.
    if len(url) - prefix.end() > 2 * max_bytes:
        raise _too_large(max_bytes)
    encoded = url[prefix.end() :]
    try:
        data = _decoded(encoded)
    except ValueError:
        # It may have line ends. Most have none, and leaving them out takes a third of the time.
        try:
            data = _decoded(encoded.translate(_SPACE))
        except ValueError as error:
            raise InvalidRequestError(f"the image's data is no valid base64: {error}") from None
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _decoded(encoded: str) -> bytes:
    return binascii.a2b_base64(encoded, strict_mode=True)


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"the image has over {max_bytes} bytes, which is the limit")
