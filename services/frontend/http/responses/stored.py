"""Shows and deletes stored responses."""

from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from services.frontend.access.gate import Gate
from services.frontend.errors import InvalidRequestError
from services.frontend.http.responses.store import ResponseStore

DEFAULT_PAGE_ITEMS = 20
MAX_PAGE_ITEMS = 100


class DeletedResponse(TypedDict):
    """A stored response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """A page of the items that led to a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


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

    async def list_input_items(self, request: Request) -> Response:
        """Returns a page of the items that led to a response."""
        query = request.query_params
        response_id = request.path_params["response_id"]
        items = self._store.input_items(self._gate.acting_account, response_id)
        return JSONResponse(
            page_of(
                items,
                after=query.get("after"),
                limit=query.get("limit", str(DEFAULT_PAGE_ITEMS)),
                order=query.get("order", "desc"),
            )
        )

    async def delete(self, request: Request) -> Response:
        """Forgets a response."""
        response_id = request.path_params["response_id"]
        self._store.delete(self._gate.acting_account, response_id)
        answer: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(answer)


def page_of(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: str, order: str
) -> InputItemList:
    """Returns a page of items, which come oldest first.

    Args:
        items: all items.
        after: the id of the item before the page; None begins the list.
        limit: the most items of the page, in digits.
        order: asc for the oldest first, or desc.

    Raises:
        InvalidRequestError: a parameter is wrong.
    """
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE_ITEMS):
        raise InvalidRequestError(
            f"limit is {limit[:64]!r}; it must be 1 to {MAX_PAGE_ITEMS}", field="limit"
        )
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {order[:64]!r}; it must be asc or desc", field="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after:
        ids = [each["id"] for each in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"after is {after[:64]!r}, which is the id of no item", field="after"
            )
        start = ids.index(after) + 1
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }
