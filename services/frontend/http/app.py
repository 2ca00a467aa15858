"""The routes of the HTTP API."""

import asyncio
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.frontend.errors import FrontendError
from services.frontend.http.bodies.reader import BodyReader
from services.frontend.http.endpoint import CHAT, COMPLETION, GenerationEndpoint
from services.frontend.http.messages.endpoint import (
    MESSAGE,
    MESSAGE_COUNT,
    CountEndpoint,
    MessageEndpoint,
    RequireVersion,
)
from services.frontend.http.responses.endpoint import InputTokensEndpoint, ResponsesEndpoint
from services.frontend.http.responses.store import ResponseStore
from services.frontend.http.responses.stored import StoredResponses
from services.frontend.http.service.nearest_path import nearest_path
from services.frontend.http.service.openapi import openapi_json
from services.frontend.http.service.start_page import start_page
from services.frontend.http.tokenization.endpoint import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeEndpoint,
    TokenizeEndpoint,
)
from services.frontend.http.wire.body import Bodies
from services.frontend.http.wire.error_forms import error_response
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.http.wire.status import RefusedCallError, http_error_of
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.served_model import ServedModel
from services.processes.heartbeats import Heartbeats
from services.settings.installation import own_version
from services.telemetry.metrics import Metrics

_UNSERVED = {
    "/v1/embeddings": "embeddings are not served: Octavo generates text",
    "/v1/responses/compact": (
        "compaction is not served: send a shorter conversation, or truncation of auto, which drops"
        " the oldest turns"
    ),
}
"""Paths of the vendors' APIs that are not served, with the reason."""


class ServiceEndpoints:
    """Endpoints about the service."""

    def __init__(
        self,
        pipeline: Pipeline,
        live: LiveRequests,
        metrics: Metrics,
        beats: Heartbeats | None,
    ) -> None:
        self._pipeline = pipeline
        self._live = live
        self._metrics = metrics
        self._beats = beats
        self._created_s = int(time.time())
        self._version = own_version()

    async def health(self, request: Request) -> Response:
        """Answers 200 while requests are accepted, else 503.

        One of several processes also says how many of them serve.
        """
        del request
        is_ready = self._pipeline.engine.is_ready and not self._live.is_draining
        answer: dict[str, Any] = {"status": "ok" if is_ready else "unavailable"}
        if self._beats is not None:
            serving, total = self._beats.num_serving, self._beats.num_processes
            answer["processes"] = {"serving": serving, "total": total}
        return JSONResponse(answer, status_code=200 if is_ready else 503)

    async def show_version(self, request: Request) -> Response:
        """Returns Octavo's version."""
        del request
        return JSONResponse({"version": self._version})

    async def list_models(self, request: Request) -> Response:
        """Lists the served model; nothing before the first connection to an engine."""
        del request
        model = self._pipeline.served_model
        return JSONResponse(
            {"object": "list", "data": [] if model is None else [self._card(model)]}
        )

    async def show_model(self, request: Request) -> Response:
        """Describes one model."""
        return JSONResponse(self._card(self._pipeline.model_named(request.path_params["name"])))

    async def show_start(self, request: Request) -> Response:
        """Returns the start page, which needs no key and shows the model only without keys."""
        del request
        if self._pipeline.gate.requires_keys:
            return start_page(model=None, version=None)
        model = self._pipeline.served_model
        return start_page(model=None if model is None else model.info.model, version=self._version)

    async def describe(self, request: Request) -> Response:
        """Describes the API."""
        del request
        body = await asyncio.to_thread(openapi_json)
        return Response(body, media_type="application/json")

    async def show_metrics(self, request: Request) -> Response:
        """Returns the metrics in Prometheus's format."""
        accept = request.headers.get("accept", "")
        body, content_type = await self._metrics.page.render(accept)
        return Response(body, headers={"content-type": content_type})

    def _card(self, model: ServedModel) -> dict[str, str | int]:
        card: dict[str, str | int] = {
            "id": model.info.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "octavo",
            "max_model_len": model.info.max_model_len,
        }
        if model.template_error:
            card["chat_template_error"] = model.template_error
        return card


def make_app(
    pipeline: Pipeline,
    live: LiveRequests,
    bodies: Bodies,
    body_reader: BodyReader,
    metrics: Metrics,
    *,
    store: ResponseStore,
    slow_reader_timeout_s: float,
    beats: Heartbeats | None,
) -> Starlette:
    """Returns the API as an ASGI application."""
    service = ServiceEndpoints(pipeline, live, metrics, beats)
    chat, completion, message, message_count, tokenize, detokenize = (
        endpoint(
            kind, pipeline, live, bodies, body_reader, slow_reader_timeout_s=slow_reader_timeout_s
        )
        for endpoint, kind in (
            (GenerationEndpoint, CHAT),
            (GenerationEndpoint, COMPLETION),
            (MessageEndpoint, MESSAGE),
            (CountEndpoint, MESSAGE_COUNT),
            (TokenizeEndpoint, TOKENIZE),
            (DetokenizeEndpoint, DETOKENIZE),
        )
    )
    responses, input_tokens = (
        endpoint(
            store,
            pipeline,
            live,
            bodies,
            body_reader,
            slow_reader_timeout_s=slow_reader_timeout_s,
        )
        for endpoint in (ResponsesEndpoint, InputTokensEndpoint)
    )
    stored = StoredResponses(store, pipeline.gate)
    return Starlette(
        routes=[
            Route("/", service.show_start),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/messages", RequireVersion(message), methods=["POST"]),
            Route("/v1/messages/count_tokens", RequireVersion(message_count), methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
            Route("/v1/responses/{response_id}", stored.show),
            Route("/v1/responses/{response_id}/input_items", stored.list_input_items),
            Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
            Route("/v1/models", service.list_models),
            Route("/v1/models/", service.list_models),
            Route("/v1/models/{name:path}", service.show_model),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", service.health),
            Route("/ping", service.health, methods=["GET", "POST"]),
            Route("/version", service.show_version),
            Route("/metrics", service.show_metrics),
            Route("/openapi.json", service.describe),
        ],
        exception_handlers={
            HTTPException: _answer_routing_error,
            RefusedCallError: _answer_error,
            FrontendError: _answer_error,
            Exception: _answer_error,
        },
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, http_error_of(error))


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    path = request.url.path
    is_missing = error.status_code == 404 or (error.status_code == 405 and request.path_params)
    if is_missing and path in _UNSERVED:
        refusal = RefusedCallError(404, _UNSERVED[path], code="unsupported_endpoint")
    elif is_missing:
        nearest = nearest_path(path, request.app.routes)
        advice = "GET / lists what is" if nearest is None else f"{nearest} is"
        refusal = RefusedCallError(404, f"{request.method} {path} is not served; {advice}")
    else:
        message = f"{request.method} {path}: {error.detail}"
        refusal = RefusedCallError(error.status_code, message)
    response = await _answer_error(request, refusal)
    response.headers.update(error.headers or {} if not is_missing else {})
    return response
