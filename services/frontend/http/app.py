"""The HTTP API as one application: its routes, and what each endpoint reads and answers with."""

import difflib
from collections.abc import Iterable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp

from services.frontend.errors import FrontendError
from services.frontend.http.answers.choices import ChoicesEndpoint
from services.frontend.http.chat.answer import ChatAnswer
from services.frontend.http.chat.calls import read_chat
from services.frontend.http.completions.answer import CompletionAnswer
from services.frontend.http.completions.calls import read_completion
from services.frontend.http.endpoint import Kind, Serving
from services.frontend.http.messages.calls import read_count, read_message
from services.frontend.http.messages.endpoint import (
    CountEndpoint,
    MessageEndpoint,
    MessageWriter,
    RequireVersion,
)
from services.frontend.http.messages.errors import message_error
from services.frontend.http.responses.calls import read_input_tokens, read_response
from services.frontend.http.responses.endpoint import (
    InputTokensEndpoint,
    ResponsesEndpoint,
    ResponsesWriter,
)
from services.frontend.http.responses.store import ResponseStore
from services.frontend.http.responses.stored import StoredResponses
from services.frontend.http.service.adapters import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    AdapterEndpoint,
)
from services.frontend.http.service.endpoints import ServiceEndpoints
from services.frontend.http.service.openapi import describe
from services.frontend.http.service.sleep import SleepEndpoints
from services.frontend.http.tokenization.calls import read_detokenize, read_tokenize
from services.frontend.http.tokenization.endpoint import DetokenizeEndpoint, TokenizeEndpoint
from services.frontend.http.vectors.calls import read_embeddings, read_rerank, read_score
from services.frontend.http.vectors.endpoints import (
    EmbeddingsEndpoint,
    RerankEndpoint,
    ScoreEndpoint,
)
from services.frontend.http.wire.access import RequireHost, RequireKey, with_cors
from services.frontend.http.wire.request_id import ReturnRequestId
from services.frontend.http.wire.status import ErrorForms, RefusedCallError
from services.transport.hosts import AllowedHosts

UNSERVED = {
    "/v1/responses/compact": (
        "compaction is not served: send a shorter conversation, or truncation of auto, which drops"
        " the oldest turns"
    ),
}
"""Paths of the vendors' APIs that are not served, with the reason."""
CHAT = Kind("HttpChat", "chatcmpl-", read_chat)
COMPLETION = Kind("HttpCompletion", "cmpl-", read_completion)
MESSAGE = Kind("HttpMessage", "msg_", read_message, MessageWriter)
MESSAGE_COUNT = Kind("HttpMessageCount", "msgcount_", read_count, MessageWriter)
RESPONSE = Kind("HttpResponse", "req_", read_response, ResponsesWriter)
INPUT_TOKENS = Kind("HttpInputTokens", "req_", read_input_tokens, ResponsesWriter)
TOKENIZE = Kind("HttpTokenize", "tok-", read_tokenize)
DETOKENIZE = Kind("HttpDetokenize", "detok-", read_detokenize)
EMBEDDINGS = Kind("HttpEmbeddings", "embd-", read_embeddings)
RERANK = Kind("HttpRerank", "rerank-", read_rerank)
SCORE = Kind("HttpScore", "score-", read_score)
PARSERS = (
    *(CHAT.read, COMPLETION.read, MESSAGE.read, MESSAGE_COUNT.read),
    *(RESPONSE.read, INPUT_TOKENS.read, TOKENIZE.read, DETOKENIZE.read),
    *(EMBEDDINGS.read, RERANK.read, SCORE.read),
    *(LOAD_ADAPTER.read, UNLOAD_ADAPTER.read),
)
ERRORS = ErrorForms({"/v1/messages": message_error})
"""The forms of errors by path."""
MAX_COMPARED_CHARACTERS = 256
"""Limit of a path that is compared."""
MAX_PARTS = 8
"""Last parts of a path of which endings are looked for."""
LIKENESS = 0.8


def make_app(
    serving: Serving,
    service: ServiceEndpoints,
    store: ResponseStore,
    *,
    cors_origins: Sequence[str],
    hosts: AllowedHosts | None,
    changes_adapters: bool = False,
    allows_sleep: bool = False,
) -> ASGIApp:
    """Returns the API as an ASGI application; without `hosts`, it answers under all names."""
    operator_routes = [
        *(_adapter_routes(serving) if changes_adapters else ()),
        *(SleepEndpoints(serving.pipeline).routes if allows_sleep else ()),
    ]
    app: ASGIApp = _routed(serving, service, store, operator_routes)
    gate = serving.pipeline.gate
    if gate.requires_keys:
        app = RequireKey(app, gate, ERRORS)
    app = ReturnRequestId(app, ERRORS)
    if cors_origins:
        app = with_cors(app, cors_origins)
    if hosts is not None and not hosts.are_all:
        app = RequireHost(app, hosts, gate.refused, ERRORS)
    return app


def _routed(
    serving: Serving,
    service: ServiceEndpoints,
    store: ResponseStore,
    operator_routes: Sequence[Route],
) -> Starlette:
    """Returns the endpoints at their paths."""
    chat = ChoicesEndpoint(CHAT, serving, ChatAnswer)
    completion = ChoicesEndpoint(COMPLETION, serving, CompletionAnswer)
    message = RequireVersion(MessageEndpoint(MESSAGE, serving), ERRORS)
    message_count = RequireVersion(CountEndpoint(MESSAGE_COUNT, serving), ERRORS)
    response = ResponsesEndpoint(RESPONSE, serving, store)
    input_tokens = InputTokensEndpoint(INPUT_TOKENS, serving, store)
    tokenize = TokenizeEndpoint(TOKENIZE, serving)
    detokenize = DetokenizeEndpoint(DETOKENIZE, serving)
    embeddings = EmbeddingsEndpoint(EMBEDDINGS, serving)
    rerank = RerankEndpoint(RERANK, serving)
    score = ScoreEndpoint(SCORE, serving)
    stored = StoredResponses(store, serving.pipeline.gate)
    return Starlette(
        routes=[
            Route("/", service.show_start),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/messages", message, methods=["POST"]),
            Route("/v1/messages/count_tokens", message_count, methods=["POST"]),
            Route("/v1/responses", response, methods=["POST"]),
            Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
            Route("/v1/responses/{response_id}", stored.show),
            Route("/v1/responses/{response_id}/input_items", stored.list_input_items),
            Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/v1/rerank", rerank, methods=["POST"]),
            Route("/v2/rerank", rerank, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/v1/models", service.list_models),
            Route("/v1/models/", service.list_models),
            Route("/v1/models/{name:path}", service.show_model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", service.health),
            Route("/ping", service.health, methods=["GET", "POST"]),
            Route("/version", service.show_version),
            Route("/metrics", service.show_metrics),
            Route("/openapi.json", describe),
            *operator_routes,
        ],
        exception_handlers={
            HTTPException: _answer_routing_error,
            RefusedCallError: _answer_error,
            FrontendError: _answer_error,
            Exception: _answer_error,
        },
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    return ERRORS.response(request.url.path, error)


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    path = request.url.path
    is_missing = error.status_code == 404 or (error.status_code == 405 and request.path_params)
    if is_missing and path in UNSERVED:
        refusal = RefusedCallError(404, UNSERVED[path], code="unsupported_endpoint")
    elif is_missing:
        nearest = nearest_path(path, request.app.routes)
        advice = "GET / lists what is" if nearest is None else f"{nearest} is"
        refusal = RefusedCallError(404, f"{request.method} {path} is not served; {advice}")
    else:
        message = f"{request.method} {path}: {error.detail}"
        refusal = RefusedCallError(error.status_code, message)
    response = ERRORS.response(path, refusal)
    response.headers.update(error.headers or {} if not is_missing else {})
    return response


def _adapter_routes(serving: Serving) -> Sequence[Route]:
    """Returns vLLM's calls that change adapters."""
    return (
        Route("/v1/load_lora_adapter", AdapterEndpoint(LOAD_ADAPTER, serving), methods=["POST"]),
        Route(
            "/v1/unload_lora_adapter", AdapterEndpoint(UNLOAD_ADAPTER, serving), methods=["POST"]
        ),
    )


def nearest_path(path: str, routes: Iterable[BaseRoute]) -> str | None:
    """Returns the served path that is most like one that is not served; None if none is like it."""
    if len(path) > MAX_COMPARED_CHARACTERS:
        return None
    served = [route for route in routes if isinstance(route, Route)]
    parts = [part for part in path.split("/") if part][-MAX_PARTS:]
    for index in range(len(parts)):
        ending = "/" + "/".join(parts[index:])
        for candidate in (f"/v1{ending}", ending):
            if candidate != path and any(_is_served(candidate, route) for route in served):
                return candidate
    literal = [route.path for route in served if not route.param_convertors]
    return next(iter(difflib.get_close_matches(path, literal, n=1, cutoff=LIKENESS)), None)


def _is_served(path: str, route: Route) -> bool:
    scope = {"type": "http", "path": path, "method": "GET"}
    return route.matches(scope)[0] is not Match.NONE
