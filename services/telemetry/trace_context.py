"""Where a request belongs in a trace (W3C Trace Context)."""

import re
from collections.abc import Iterable

TRACEPARENT = "traceparent"
"""Name of the HTTP header and of the gRPC metadata (W3C Trace Context, section 3.2)."""

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def read_traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns where a call belongs in a trace, as its metadata says; empty for nowhere."""
    for name, value in metadata or ():
        if name == TRACEPARENT and isinstance(value, str):
            return checked_traceparent(value)
    return ""


def checked_traceparent(value: str) -> str:
    """Returns a caller's word if it has the right form, else nothing, as the standard asks."""
    return value if _FORM.fullmatch(value) else ""
