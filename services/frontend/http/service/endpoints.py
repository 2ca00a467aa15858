"""Endpoints about the service: its health, its models and its metrics."""

import time
from dataclasses import replace
from typing import Literal, NotRequired

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from services.frontend.http.service.start_page import start_page
from services.frontend.http.wire.live_requests import LiveRequests
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.served_model import ServedModel
from services.processes.heartbeats import Heartbeats
from services.settings.installation import own_version
from services.telemetry.metrics import Metrics


class ModelCard(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    """The model of an adapter."""
    chat_template_error: NotRequired[str]


class ModelList(TypedDict):
    """The models and the adapters that the caller may use; none before contact with an engine."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(TypedDict):
    """The version of the frontend."""

    version: str


class ProcessCounts(TypedDict):
    """How many of the frontend's processes serve."""

    serving: int
    total: int


class HealthAnswer(TypedDict):
    """Whether requests are taken."""

    status: Literal["ok", "unavailable"]
    processes: NotRequired[ProcessCounts]


class ServiceEndpoints:
    """Endpoints about the service."""

    def __init__(
        self, pipeline: Pipeline, live: LiveRequests, metrics: Metrics, beats: Heartbeats | None
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
        answer: HealthAnswer = {"status": "ok" if is_ready else "unavailable"}
        if self._beats is not None:
            serving, total = self._beats.num_serving, self._beats.num_processes
            answer["processes"] = {"serving": serving, "total": total}
        return JSONResponse(answer, status_code=200 if is_ready else 503)

    async def show_version(self, request: Request) -> Response:
        """Returns Octavo's version."""
        del request
        answer: VersionAnswer = {"version": self._version}
        return JSONResponse(answer)

    async def list_models(self, request: Request) -> Response:
        """Lists the models and adapters; nothing before the first connection to an engine."""
        del request
        models = self._pipeline.models
        cards = [
            self._card(replace(model, adapter=name))
            for model in models.all
            for name in ("", *models.adapter_names(model))
        ]
        answer: ModelList = {"object": "list", "data": cards}
        return JSONResponse(answer)

    async def show_model(self, request: Request) -> Response:
        """Describes one model."""
        return JSONResponse(self._card(self._pipeline.models.named(request.path_params["name"])))

    async def show_start(self, request: Request) -> Response:
        """Returns the start page, which needs no key and shows the model only without keys."""
        del request
        if self._pipeline.gate.requires_keys:
            return start_page(model=None, version=None)
        models = ", ".join(model.info.model for model in self._pipeline.models.all)
        return start_page(model=models or None, version=self._version)

    async def show_metrics(self, request: Request) -> Response:
        """Returns the metrics in Prometheus's format."""
        accept = request.headers.get("accept", "")
        body, content_type = await self._metrics.page.render(accept)
        return Response(body, headers={"content-type": content_type})

    def _card(self, model: ServedModel) -> ModelCard:
        card: ModelCard = {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "octavo",
            "max_model_len": model.info.max_model_len,
        }
        if model.adapter:
            card["parent"] = model.info.model
        if model.template_error:
            card["chat_template_error"] = model.template_error
        return card
