"""Checks which URLs may be fetched."""

import re
from collections.abc import Set
from dataclasses import dataclass

from services.frontend.errors import InvalidRequestError

HTTPS_PORT = 443
MAX_URL_CHARACTERS = 8192
_MAX_HOST = 253 + len(":65535")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label begins with a letter, else it would be a form of IPv4 address, such as 0x7f.1.
_NAME = rf"(?:{_LABEL}\.)+[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?"
_HOST = re.compile(rf"({_NAME})(?::([0-9]{{1,5}}))?")
_URL = re.compile(r"https://([^/?#]*)([/?][!-~]*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r"[^!-~]|[\\\"<>]")


@dataclass(frozen=True, slots=True)
class MediaHost:
    """A host that images may be fetched from."""

    name: str
    """In lower case; a full name with a dot inside and none at its end."""
    port: int = HTTPS_PORT

    @classmethod
    def parse(cls, text: str) -> "MediaHost":
        """Reads "name" or "name:port".

        Raises:
            ValueError: it is another thing, such as an IP address or a pattern.
        """
        match = _HOST.fullmatch(text.lower()) if len(text) <= _MAX_HOST else None
        if match is None:
            raise ValueError(
                f"{text[:253]!r} is no host name such as images.example.com or"
                " images.example.com:8443"
            )
        port = HTTPS_PORT if match[2] is None else int(match[2])
        if not 0 < port < 2**16:
            raise ValueError(f"{text!r} has no port from 1 to {2**16 - 1}")
        return cls(match[1], port)

    def __str__(self) -> str:
        return self.name if self.port == HTTPS_PORT else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A URL that may be fetched."""

    host: MediaHost
    target: str
    """Path and query."""


def parse_media_url(url: str, hosts: Set[MediaHost]) -> MediaUrl:
    """Returns the parts of an https URL of one of some hosts.

    Raises:
        InvalidRequestError: it is no such URL.
    """
    if len(url) > MAX_URL_CHARACTERS:
        raise InvalidRequestError(
            f"the image's URL has {len(url)} characters; the limit is {MAX_URL_CHARACTERS}"
        )
    if not url[:8].lower() == "https://":
        raise InvalidRequestError("an image's URL begins with data: or https://")
    if _FORBIDDEN.search(url):
        raise InvalidRequestError("the image's URL has characters that must be percent-encoded")
    match = _URL.fullmatch(url.partition("#")[0])
    authority = "" if match is None else match[1]
    if match is None or "@" in authority:
        raise InvalidRequestError("the image's URL has credentials or no host")
    try:
        host = MediaHost.parse(authority)
    except ValueError:
        host = None
    if host is None or host not in hosts:
        raise InvalidRequestError(
            f"images are not fetched from {authority[:253]!r}; the operator names hosts with"
            " --media-hosts"
        )
    target = match[2] or "/"
    return MediaUrl(host, target if target.startswith("/") else f"/{target}")
