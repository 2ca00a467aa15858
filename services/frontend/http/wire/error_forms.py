"""Errors in the form of the API that a path belongs to."""

from starlette.responses import JSONResponse

from services.frontend.http.messages.errors import PATH, message_error
from services.frontend.http.wire.status import HttpError


def error_response(path: str, told: HttpError) -> JSONResponse:
    """Returns the response to a request that did not reach its endpoint."""
    body = message_error(told) if path == PATH or path.startswith(f"{PATH}/") else told.body
    return JSONResponse(body, status_code=told.status, headers=told.headers)
