"""vLLM's three calls about sleep: POST /sleep and /wake_up, GET /is_sleeping."""

from collections.abc import Sequence
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.frontend.engine_client.sleep_orders import MODES, are_asleep, sleep_all, wake_all
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.pipeline import Pipeline

_MODES = {**{mode: mode for mode in MODES}, "keep": "recompute"}
"""Values of `mode`: ours, and vLLM's."""


class SleepingAnswer(TypedDict):
    """Whether all engines sleep."""

    is_sleeping: bool


class SleepEndpoints:
    """Puts all engines to sleep and wakes them, for keys with the operator right."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def routes(self) -> Sequence[Route]:
        """The calls at their paths."""
        return (
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        )

    async def sleep(self, request: Request) -> Response:
        """Answers once the engines' memory is free; `level` is 1 or 2, by default 1."""
        self._pipeline.gate.check_is_operator()
        _check_no_tags(request)
        level = _one_of(request, "level", "1", ("1", "2"))
        mode = _one_of(request, "mode", "wait", tuple(_MODES))
        await sleep_all(self._pipeline.engine.engines, int(level), _MODES[mode])
        return Response()

    async def wake_up(self, request: Request) -> Response:
        """Answers once the engines take requests."""
        self._pipeline.gate.check_is_operator()
        _check_no_tags(request)
        await wake_all(self._pipeline.engine.engines)
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        """Says whether all engines sleep."""
        del request
        self._pipeline.gate.check_is_operator()
        answer: SleepingAnswer = {
            "is_sleeping": await are_asleep(self._pipeline.engine.engines),
        }
        return JSONResponse(answer)


def _check_no_tags(request: Request) -> None:
    if "tags" in request.query_params:
        raise InvalidRequestError("weights and cache sleep and wake together", field="tags")


def _one_of(request: Request, name: str, default: str, values: Sequence[str]) -> str:
    """Returns a parameter of the query; raises InvalidRequestError for other values."""
    value: str = request.query_params.get(name, default)
    if value not in values:
        raise InvalidRequestError(f"{name} must be one of {', '.join(values)}", field=name)
    return value
