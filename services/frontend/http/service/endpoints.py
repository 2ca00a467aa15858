"""Endpoints about the service: its health, its models, its metrics and its description."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.frontend.http.service.openapi import openapi_json
from services.frontend.http.service.start_page import start_page
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.served_model import ServedModel
from services.processes.heartbeats import Heartbeats
from services.settings.installation import own_version
from services.telemetry.metrics import Metrics


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
