"""Lets web pages of other origins use the API."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

MAX_AGE_S = 600
"""Time for which browsers need not ask again."""


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application with Starlette's answers to browsers; "*" allows all origins.

    Keys come in a header that pages set themselves, so no cookies are allowed.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after", "x-request-id", "request-id"],
        max_age=MAX_AGE_S,
    )
