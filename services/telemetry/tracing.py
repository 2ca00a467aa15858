"""Whether requests are traced, and where a request belongs in a trace (W3C Trace Context)."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.settings.installation import require_extras

if TYPE_CHECKING:
    from services.telemetry.spans import Tracing

TRACEPARENT = "traceparent"
"""Name of the HTTP header and of the gRPC metadata (W3C Trace Context, section 3.2)."""

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def _checked(endpoint: str) -> str:
    """Refuses an endpoint that is no URL, and one that nothing could send to."""
    require_extras("tracing")
    urlsplit(endpoint).port  # noqa: B018  reading it raises ValueError
    return endpoint


OtlpEndpoint = Annotated[str, Field(pattern=r"^https?://[^/\s]+:\d+$"), AfterValidator(_checked)]
"""Address of a collector, as http://host:port or https://host:port."""


def open_tracing(endpoint: str | None, *, service: str) -> "Tracing | None":
    """Returns what makes spans; None, and nothing is imported, where no endpoint is configured."""
    if endpoint is None:
        return None
    from services.telemetry.spans import Tracing

    return Tracing(endpoint, service=service)


def read_traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns where a call belongs in a trace, as its metadata says; empty for nowhere."""
    for name, value in metadata or ():
        if name == TRACEPARENT and isinstance(value, str):
            return checked_traceparent(value)
    return ""


def checked_traceparent(value: str) -> str:
    """Returns a caller's word if it has the right form, else nothing, as the standard asks."""
    return value if _FORM.fullmatch(value) else ""
