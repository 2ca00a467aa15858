"""The OpenAPI description of the HTTP API, generated from its schemas."""

import json
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.http.chat.schema import ChatCompletionRequest
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.messages.answer_schema import MessageError, MessageEvent, ReplyMessage
from services.frontend.http.messages.schema import CountTokensRequest, MessagesRequest
from services.frontend.http.responses.answer_schema import Response
from services.frontend.http.responses.event_schema import ResponseEvent
from services.frontend.http.responses.schema import InputTokensRequest, ResponsesRequest
from services.frontend.http.service import answer_schema
from services.frontend.http.tokenization.calls import DetokenizeRequest, TokenizeRequest
from services.frontend.http.wire.request_id import HEADER, PATTERN

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
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
_Content = dict[str, Any]
_UNNAMED = "lines of `data: ` and JSON, then `data: [DONE]`"
_NAMED = "pairs of lines, `event: ` with the event's type, and `data: ` with JSON"
_PAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "after": ("The id of the item before the page.", {"type": "string"}),
    "limit": ("The most items; absent: 20.", {"type": "integer", "minimum": 1, "maximum": 100}),
    "order": ("Absent: desc, the newest first.", {"enum": ["asc", "desc"]}),
}
_TEXT: _Content = {"text/plain": {}, "application/openmetrics-text": {}}
_REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    InputTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ANSWERS = (
    answer_schema.ChatCompletion,
    answer_schema.ChatCompletionChunk,
    answer_schema.Completion,
    ReplyMessage,
    MessageEvent,
    MessageError,
    answer_schema.CountAnswer,
    Response,
    ResponseEvent,
    answer_schema.DeletedResponse,
    answer_schema.InputTokens,
    answer_schema.InputItemList,
    answer_schema.TokenizeAnswer,
    answer_schema.DetokenizeAnswer,
    answer_schema.ModelList,
    answer_schema.ModelCard,
    answer_schema.VersionAnswer,
    answer_schema.HealthAnswer,
)


@cache
def openapi_json() -> bytes:
    """Returns the OpenAPI document as JSON; the first call takes a tenth of a second."""
    return json.dumps(openapi_document(), separators=(",", ":")).encode()


def openapi_document() -> dict[str, Any]:
    """Returns the API as an OpenAPI 3.1 document.

    It describes bodies and answers; docs/http.md explains their meaning.
    """
    _, definitions = models_json_schema(
        [(model, "validation") for model in (*_REQUESTS, *_ANSWERS)], ref_template=_REFERENCE
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": "1", "description": "OpenAI-compatible inference."},
        "security": [{}, *({name: []} for name in _KEYS)],
        "paths": {
            "/v1/chat/completions": _post(
                "Answers a conversation.",
                ChatCompletionRequest,
                _content(answer_schema.ChatCompletion, event=answer_schema.ChatCompletionChunk),
            ),
            "/v1/completions": _post(
                "Continues prompts.",
                CompletionRequest,
                _content(answer_schema.Completion, event=answer_schema.Completion),
            ),
            "/v1/messages": _post(
                "Answers a conversation in Anthropic's form.",
                MessagesRequest,
                _content(ReplyMessage, event=MessageEvent, lines=_NAMED),
                error="MessageError",
            ),
            "/v1/messages/count_tokens": _post(
                "Counts the tokens of a conversation.",
                CountTokensRequest,
                _content(answer_schema.CountAnswer),
                error="MessageError",
            ),
            "/v1/responses": _post(
                "Creates a response.",
                ResponsesRequest,
                _content(Response, event=ResponseEvent, lines=f"{_NAMED}, then `data: [DONE]`"),
            ),
            "/v1/responses/input_tokens": _post(
                "Counts the tokens of a response's input.",
                InputTokensRequest,
                _content(answer_schema.InputTokens),
            ),
            "/v1/responses/{response_id}/input_items": {
                **_bodiless(
                    "get",
                    "Lists the items that led to a stored response.",
                    _content(answer_schema.InputItemList),
                    "404",
                ),
                "parameters": [
                    _in_path("response_id", "The response's id."),
                    *(_in_query(name, *told) for name, told in _PAGE.items()),
                ],
            },
            "/v1/responses/{response_id}": {
                **_bodiless("get", "Returns a stored response.", _content(Response), "404"),
                **_bodiless(
                    "delete",
                    "Forgets a stored response.",
                    _content(answer_schema.DeletedResponse),
                    "404",
                ),
                "parameters": [_in_path("response_id", "The response's id.")],
            },
            "/tokenize": _post(
                "Returns the token ids of a prompt.",
                TokenizeRequest,
                _content(answer_schema.TokenizeAnswer),
            ),
            "/detokenize": _post(
                "Returns the text of token ids.",
                DetokenizeRequest,
                _content(answer_schema.DetokenizeAnswer),
            ),
            "/v1/models": _bodiless(
                "get", "Lists the model that is served.", _content(answer_schema.ModelList)
            ),
            "/v1/models/{name}": {
                **_bodiless(
                    "get",
                    "Describes one model.",
                    _content(answer_schema.ModelCard),
                    "404",
                    "503",
                ),
                "parameters": [_in_path("name", "The model's name, which may have slashes.")],
            },
            "/": _bodiless("get", "Returns a page for people.", {"text/html": {}}),
            "/health": _health(),
            "/ping": _health("get", "post"),
            "/version": _bodiless(
                "get", "Returns the version.", _content(answer_schema.VersionAnswer)
            ),
            "/metrics": _bodiless("get", "Returns metrics for Prometheus.", _TEXT),
        },
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": _KEYS,
        },
    }


def _post(
    summary: str, request: type[BaseModel], content: _Content, *, error: str = "Error"
) -> dict[str, Any]:
    """Describes an endpoint that reads a body."""
    return {
        "post": {
            "summary": summary,
            "parameters": [_REQUEST_ID],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _reference(request)}},
            },
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_refusals(*_REFUSALS, error=error),
            },
        }
    }


def _content(
    answer: type[BaseModel], *, event: type[BaseModel] | None = None, lines: str = _UNNAMED
) -> _Content:
    """Describes an answer; `event` is the data of its events, which have these lines."""
    content: _Content = {"application/json": {"schema": _reference(answer)}}
    if event is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": f"With `stream`: {lines}.",
                "contentMediaType": "application/json",
                "contentSchema": _reference(event),
            }
        }
    return content


def _bodiless(method: str, summary: str, content: _Content, *refusals: str) -> dict[str, Any]:
    """Describes an endpoint that reads no body."""
    return {
        method: {
            "summary": summary,
            "parameters": [_REQUEST_ID],
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_refusals("400", "401", *refusals),
            },
        }
    }


def _in_path(name: str, meaning: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": meaning,
        "schema": {"type": "string", "minLength": 1},
    }


def _in_query(name: str, meaning: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": meaning, "schema": schema}


def _health(*methods: str) -> dict[str, Any]:
    content = _content(answer_schema.HealthAnswer)
    described = _bodiless("get", "Says whether requests are taken.", content)["get"]
    responses = described["responses"]
    responses["503"] = {**responses["200"], "description": "requests are not taken now"}
    return dict.fromkeys(methods or ("get",), described)


def _refusals(*statuses: str, error: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=error)}}}
    return {each: {"description": _REFUSALS[each], "content": content} for each in statuses}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
