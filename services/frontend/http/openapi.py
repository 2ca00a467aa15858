"""The OpenAPI description of the HTTP API, generated from its schemas."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.http import answer_schema
from services.frontend.http.request_id import HEADER, PATTERN
from services.frontend.http.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

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
    "404": "another model is served, or there is no such path",
    "408": "the body took too long",
    "413": "the body is too large",
    "415": "the body is not application/json, or its encoding is not supported",
    "429": "too many requests",
    "503": "no engine takes requests now",
    "504": "the request's time ran out",
}
_KEYS = {"keys": {"type": "http", "scheme": "bearer", "description": "An API key, if configured."}}
_REQUEST_ID = {
    "name": HEADER,
    "in": "header",
    "description": "Names the request in logs; the answer repeats it.",
    "schema": {"type": "string", "pattern": f"^{PATTERN}$"},
}
_REQUESTS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ANSWERS = (
    answer_schema.ChatCompletion,
    answer_schema.ChatCompletionChunk,
    answer_schema.Completion,
    answer_schema.TokenizeAnswer,
    answer_schema.DetokenizeAnswer,
    answer_schema.ModelList,
    answer_schema.ModelCard,
    answer_schema.VersionAnswer,
    answer_schema.HealthAnswer,
)


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
        "security": [{}, {"keys": []}],
        "paths": {
            "/v1/chat/completions": _post(
                "Answers a conversation.",
                ChatCompletionRequest,
                answer_schema.ChatCompletion,
                event=answer_schema.ChatCompletionChunk,
            ),
            "/v1/completions": _post(
                "Continues prompts.",
                CompletionRequest,
                answer_schema.Completion,
                event=answer_schema.Completion,
            ),
            "/tokenize": _post(
                "Returns the token ids of a prompt.", TokenizeRequest, answer_schema.TokenizeAnswer
            ),
            "/detokenize": _post(
                "Returns the text of token ids.", DetokenizeRequest, answer_schema.DetokenizeAnswer
            ),
            "/v1/models": _get("Lists the model that is served.", answer_schema.ModelList),
            "/v1/models/{name}": {
                **_get("Describes one model.", answer_schema.ModelCard, "404", "503"),
                "parameters": [
                    {
                        "name": "name",
                        "in": "path",
                        "required": True,
                        "description": "The model's name, which may have slashes.",
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            },
            "/health": _health(),
            "/ping": _health("get", "post"),
            "/version": _get("Returns the version.", answer_schema.VersionAnswer),
            "/metrics": _get("Returns metrics for Prometheus."),
        },
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": _KEYS,
        },
    }


def _post(
    summary: str,
    request: type[BaseModel],
    answer: type[BaseModel],
    *,
    event: type[BaseModel] | None = None,
) -> dict[str, Any]:
    """Describes an endpoint; the data of its events, and their end, are in `event`."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(answer)}}
    if event is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With `stream`: lines of `data: ` and JSON, then `data: [DONE]`.",
                "contentMediaType": "application/json",
                "contentSchema": _reference(event),
            }
        }
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
                **_refusals(*_REFUSALS),
            },
        }
    }


def _get(summary: str, answer: type[BaseModel] | None = None, *refusals: str) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"text/plain": {}, "application/openmetrics-text": {}}
        if answer is None
        else {"application/json": {"schema": _reference(answer)}}
    )
    return {
        "get": {
            "summary": summary,
            "parameters": [_REQUEST_ID],
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_refusals("400", "401", *refusals),
            },
        }
    }


def _health(*methods: str) -> dict[str, Any]:
    described = _get("Says whether requests are taken.", answer_schema.HealthAnswer)["get"]
    responses = described["responses"]
    responses["503"] = {**responses["200"], "description": "requests are not taken now"}
    return dict.fromkeys(methods or ("get",), described)


def _refusals(*statuses: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    return {each: {"description": _REFUSALS[each], "content": error} for each in statuses}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
