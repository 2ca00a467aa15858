"""The OpenAPI description of the HTTP API, generated from the types of its bodies and answers."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from services.frontend.http.chat.answer import ChatCompletion, ChatCompletionChunk
from services.frontend.http.chat.schema import ChatCompletionRequest
from services.frontend.http.completions.answer import Completion
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.messages.answer_schema import CountAnswer, MessageEvent, ReplyMessage
from services.frontend.http.messages.errors import MessageError
from services.frontend.http.messages.schema import CountTokensRequest, MessagesRequest
from services.frontend.http.responses.answer_schema import InputTokenCount, Response
from services.frontend.http.responses.event_schema import ResponseEvent
from services.frontend.http.responses.schema import InputTokensRequest, ResponsesRequest
from services.frontend.http.responses.stored import DeletedResponse, InputItemList
from services.frontend.http.service.endpoints import (
    HealthAnswer,
    ModelCard,
    ModelList,
    VersionAnswer,
)
from services.frontend.http.tokenization.calls import DetokenizeRequest, TokenizeRequest
from services.frontend.http.tokenization.endpoint import DetokenizeAnswer, TokenizeAnswer
from services.frontend.http.vectors.answers import EmbeddingList, Ranking, ScoreList
from services.frontend.http.vectors.calls import (
    EmbeddingsRequest,
    RerankRequest,
    ScoreRequest,
)
from services.frontend.http.wire.request_id import HEADER, PATTERN
from services.frontend.http.wire.status import Error

_REFERENCE = "#/components/schemas/{model}"
_REFUSALS = {
    "400": "the request is wrong, or asks for something that is not served",
    "401": "there is no API key, or one that is not known",
    "404": "another model is served, or there is no such path or response",
    "408": "the body took too long",
    "413": "the body is too large",
    "415": "the body is not application/json, or its encoding is not supported",
    "429": "too many requests",
    "503": "no engine takes requests now",
    "504": "the request's time ran out",
}
_KEYS = {
    "keys": {"type": "http", "scheme": "bearer", "description": "An API key, if configured."},
    "named_keys": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REQUEST_ID = {
    "name": HEADER,
    "in": "header",
    "description": "Names the request in logs; the answer repeats it.",
    "schema": {"type": "string", "pattern": f"^{PATTERN}$"},
}
_UNNAMED = "lines of `data: ` and JSON, then `data: [DONE]`"
_NAMED = "pairs of lines, `event: ` with the event's type, and `data: ` with JSON"


def _in_path(name: str, meaning: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": meaning, "schema": schema}


def _in_query(name: str, meaning: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": meaning, "schema": schema}


_RESPONSE_ID = _in_path("response_id", "The response's id.")
_PAGE = (
    _in_query("after", "The id of the item before the page.", type="string"),
    _in_query("limit", "The most items; absent: 20.", type="integer", minimum=1, maximum=100),
    _in_query("order", "Absent: desc, the newest first.", enum=["asc", "desc"]),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    path: str
    summary: str
    answer: Any
    """The type of its answer, or the media types of one that is not JSON."""
    request: Any = None
    """The type of its body; None without one."""
    event: Any = None
    """The type of the data of its events."""
    lines: str = _UNNAMED
    """The form of its events."""
    error: Any = Error
    method: str = "get"
    """Without a body; with one, it is post."""
    refusals: Sequence[str] = ()
    """Statuses besides those of all operations."""
    parameters: Sequence[Mapping[str, Any]] = ()
    """Parameters of its path."""

    def described(self) -> dict[str, Any]:
        """Returns the operation as OpenAPI has it."""
        statuses = _REFUSALS if self.request is not None else ("400", "401", *self.refusals)
        error = {"application/json": {"schema": _reference(self.error)}}
        body: dict[str, Any] = {}
        if self.request is not None:
            content = {"application/json": {"schema": _reference(self.request)}}
            body = {"requestBody": {"required": True, "content": content}}
        return {
            "summary": self.summary,
            "parameters": [_REQUEST_ID],
            **body,
            "responses": {
                "200": {"description": "the answer", "content": self._content()},
                **{each: {"description": _REFUSALS[each], "content": error} for each in statuses},
            },
        }

    def types(self) -> list[Any]:
        """Returns the types that it refers to."""
        answer = () if isinstance(self.answer, tuple) else (self.answer,)
        kinds = (self.request, *answer, self.event, self.error)
        return [each for each in kinds if each is not None]

    def _content(self) -> dict[str, Any]:
        if isinstance(self.answer, tuple):
            return {media_type: {} for media_type in self.answer}
        content: dict[str, Any] = {"application/json": {"schema": _reference(self.answer)}}
        if self.event is not None:
            content["text/event-stream"] = {
                "schema": {
                    "type": "string",
                    "description": f"With `stream`: {self.lines}.",
                    "contentMediaType": "application/json",
                    "contentSchema": _reference(self.event),
                }
            }
        return content


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "Answers a conversation.",
        ChatCompletion,
        ChatCompletionRequest,
        ChatCompletionChunk,
    ),
    Operation("/v1/completions", "Continues prompts.", Completion, CompletionRequest, Completion),
    Operation(
        "/v1/messages",
        "Answers a conversation in Anthropic's form.",
        ReplyMessage,
        MessagesRequest,
        MessageEvent,
        _NAMED,
        MessageError,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation.",
        CountAnswer,
        CountTokensRequest,
        error=MessageError,
    ),
    Operation(
        "/v1/responses",
        "Creates a response.",
        Response,
        ResponsesRequest,
        ResponseEvent,
        f"{_NAMED}, then `data: [DONE]`",
    ),
    Operation(
        "/v1/responses/input_tokens",
        "Counts the tokens of a response's input.",
        InputTokenCount,
        InputTokensRequest,
    ),
    Operation(
        "/v1/responses/{response_id}/input_items",
        "Lists the items that led to a stored response.",
        InputItemList,
        refusals=("404",),
        parameters=(_RESPONSE_ID, *_PAGE),
    ),
    Operation(
        "/v1/responses/{response_id}",
        "Returns a stored response.",
        Response,
        refusals=("404",),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "/v1/responses/{response_id}",
        "Forgets a stored response.",
        DeletedResponse,
        method="delete",
        refusals=("404",),
    ),
    Operation("/v1/embeddings", "Returns vectors of texts.", EmbeddingList, EmbeddingsRequest),
    *(
        Operation(path, "Ranks documents for a query.", Ranking, RerankRequest)
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    Operation("/v1/score", "Scores pairs of texts.", ScoreList, ScoreRequest),
    Operation("/tokenize", "Returns the token ids of a prompt.", TokenizeAnswer, TokenizeRequest),
    Operation("/detokenize", "Returns the text of token ids.", DetokenizeAnswer, DetokenizeRequest),
    Operation("/v1/models", "Lists the model that is served.", ModelList),
    Operation(
        "/v1/models/{name}",
        "Describes one model.",
        ModelCard,
        refusals=("404", "503"),
        parameters=(_in_path("name", "The model's name, which may have slashes."),),
    ),
    Operation("/", "Returns a page for people.", ("text/html",)),
    *(
        Operation(path, "Says whether requests are taken.", HealthAnswer, method=method)
        for path, method in (("/health", "get"), ("/ping", "get"), ("/ping", "post"))
    ),
    Operation("/version", "Returns the version.", VersionAnswer),
    Operation(
        "/metrics",
        "Returns metrics for Prometheus.",
        ("text/plain", "application/openmetrics-text"),
    ),
)


async def describe(request: Request) -> HttpResponse:
    """Describes the API."""
    del request
    body = await asyncio.to_thread(openapi_json)
    return HttpResponse(body, media_type="application/json")


@cache
def openapi_json() -> bytes:
    """Returns the OpenAPI document as JSON; the first call takes a tenth of a second."""
    return json.dumps(openapi_document(), separators=(",", ":")).encode()


def openapi_document() -> dict[str, Any]:
    """Returns the API as an OpenAPI 3.1 document.

    It describes bodies and answers; docs/http.md explains their meaning.
    """
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        path = paths.setdefault(each.path, {})
        method = each.method if each.request is None else "post"
        path[method] = each.described()
        if each.parameters:
            path["parameters"] = list(each.parameters)
        if each.answer is HealthAnswer:
            answers = path[method]["responses"]
            answers["503"] = {**answers["200"], "description": "requests are not taken now"}
    kinds = {kind.__name__: kind for each in OPERATIONS for kind in each.types()}
    _, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, kind in kinds.items()],
        ref_template=_REFERENCE,
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": "1", "description": "OpenAI-compatible inference."},
        "security": [{}, *({name: []} for name in _KEYS)],
        "paths": paths,
        "components": {"schemas": definitions["$defs"], "securitySchemes": _KEYS},
    }


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=kind.__name__)}
