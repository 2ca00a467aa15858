"""Whether requests are traced."""

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.settings.installation import require_extras

if TYPE_CHECKING:
    from services.telemetry.spans import Tracing


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
