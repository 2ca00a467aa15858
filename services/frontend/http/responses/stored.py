"""Shows and deletes stored responses."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.frontend.access.gate import Gate
from services.frontend.errors import InvalidRequestError
from services.frontend.http.responses.store import ResponseStore


class StoredResponses:
    """Endpoints about the acting caller's stored responses."""

    def __init__(self, store: ResponseStore, gate: Gate) -> None:
        self._store = store
        self._gate = gate

    async def show(self, request: Request) -> Response:
        """Returns a response as it was answered."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InvalidRequestError(
                "a stored response is not streamed again; leave stream out", field="stream"
            )
        body = self._store.body(self._gate.acting_account, request.path_params["response_id"])
        return Response(body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forgets a response."""
        response_id = request.path_params["response_id"]
        self._store.delete(self._gate.acting_account, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
