"""The OpenAPI description of the HTTP API, generated from its schema."""

from typing import Any

from pydantic.json_schema import models_json_schema

from services.frontend.http.messages.schema import CountTokensRequest, MessagesRequest
from services.frontend.http.responses.schema import ResponsesRequest
from services.frontend.http.schema import ChatCompletionRequest, CompletionRequest

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
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_REFUSALS = {
    "400": "the request is wrong, or asks for something that is not served",
    "404": "another model is served, or there is no such path or response",
    "408": "the body took too long",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "too many requests",
    "503": "no engine takes requests now",
    "504": "the request's time ran out",
}


def openapi_document() -> dict[str, Any]:
    """Returns the API as an OpenAPI 3.1 document.

    It describes accepted bodies; docs/http.md explains their meaning.
    """
    requests = (
        ChatCompletionRequest,
        CompletionRequest,
        MessagesRequest,
        CountTokensRequest,
        ResponsesRequest,
    )
    _, definitions = models_json_schema(
        [(request, "validation") for request in requests], ref_template=_REFERENCE
    )
    schemas = definitions["$defs"]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": "1", "description": "OpenAI-compatible inference."},
        "paths": {
            "/v1/chat/completions": {"post": _generation("Answers a conversation.", requests[0])},
            "/v1/completions": {"post": _generation("Continues a prompt.", requests[1])},
            "/v1/messages": {
                "post": _generation("Answers a conversation.", requests[2], error="MessageError")
            },
            "/v1/messages/count_tokens": {
                "post": _count("Counts the tokens of a conversation.", requests[3])
            },
            "/v1/responses": {"post": _generation("Creates a response.", ResponsesRequest)},
            "/v1/responses/{response_id}": {
                "get": _lookup("Returns a stored response.", "404"),
                "delete": _lookup("Forgets a stored response.", "404"),
                "parameters": [_in_path("response_id")],
            },
            "/v1/models": {"get": _lookup("Lists the model that is served.")},
            "/v1/models/{name}": {
                "get": _lookup("Describes one model.", "404"),
                "parameters": [_in_path("name")],
            },
            "/health": {"get": _lookup("Says whether requests are taken.", "503")},
            "/metrics": {"get": _lookup("Tells figures for Prometheus.", form="text/plain")},
        },
        "components": {"schemas": {**schemas, "Error": _ERROR, "MessageError": _MESSAGE_ERROR}},
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _generation(summary: str, request: type, *, error: str = "Error") -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": _body(request),
        "responses": {
            "200": {
                "description": "the output, whole or as a stream",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            **_refusals(*_REFUSALS, error=error),
        },
    }


def _count(summary: str, request: type) -> dict[str, Any]:
    answer = _lookup(summary, *_REFUSALS, error="MessageError")
    return {**answer, "requestBody": _body(request)}


def _body(request: type) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(model=request.__name__)}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _lookup(
    summary: str, *refusals: str, form: str = "application/json", error: str = "Error"
) -> dict[str, Any]:
    answer = {"description": "the answer", "content": {form: {}}}
    return {"summary": summary, "responses": {"200": answer, **_refusals(*refusals, error=error)}}


def _refusals(*statuses: str, error: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=error)}}}
    return {each: {"description": _REFUSALS[each], "content": content} for each in statuses}
