"""Names requests by the X-Request-Id of their callers."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.wire.status import ErrorForms, RefusedCallError

HEADER = "x-request-id"
MAX_CHARACTERS = 64
"""Leaves room for what the frontend adds to an id."""
PATTERN = rf"[A-Za-z0-9._:~=+@-]{{1,{MAX_CHARACTERS}}}"
"""A valid id, as a regular expression."""
_VALID = re.compile(PATTERN)
_NUM_DIGITS = 8


class ReturnRequestId:
    """An ASGI application that returns the caller's X-Request-Id with each response of another."""

    def __init__(self, app: ASGIApp, errors: ErrorForms) -> None:
        self._app = app
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; a wrong id is refused."""
        given = Headers(scope=scope).get(HEADER)
        if given is None:
            await self._app(scope, receive, send)
            return
        if not _VALID.fullmatch(given):
            refusal = RefusedCallError(
                400,
                f"{HEADER} must have 1 to {MAX_CHARACTERS} characters, each a letter, a digit"
                " or one of ._:~=+@-",
            )
            await self._errors.response(scope["path"], refusal)(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = given
            await send(message)

        await self._app(scope, receive, send_with_id)


def new_request_id(scope: Scope, prefix: str) -> str:
    """Returns a new id for a request; it contains the caller's, which several requests may have."""
    given = Headers(scope=scope).get(HEADER)
    unique = uuid.uuid4().hex
    return f"{prefix}{unique}" if given is None else f"{prefix}{given}-{unique[:_NUM_DIGITS]}"
