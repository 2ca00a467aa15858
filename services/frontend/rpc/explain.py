"""Says where the time of a request went."""

import asyncio
import time
from collections.abc import Sequence

from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.access.caller import Caller
from services.frontend.access.gate import Gate
from services.frontend.engine_client.client import EngineClient
from services.frontend.engine_client.route import Route, Visit
from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NotPermittedError,
    UnknownRequestError,
)
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.recent_requests import RequestStory
from services.frontend.pipeline.request import MAX_REQUEST_ID_CHARACTERS

_INDEX_MARK = "#"
"""Comes before the index of an output in its name; see `samples.sample_id`."""


async def explain(pipeline: Pipeline, request_id: str, caller: Caller) -> pb.ExplainRequestResponse:
    """Returns the parts of the frontend and of the engines of a caller's request.

    Raises:
        InvalidRequestError: the id is no request's.
        UnknownRequestError: no request of the caller with this id is remembered.
    """
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError("request_id must be that of a request", field="request_id")
    engine_id = caller.engine_request_id(request_id)
    whole = request_id.partition(_INDEX_MARK)[0]
    recent = pipeline.requests.recent
    story = recent.find(engine_id) or recent.find(caller.engine_request_id(whole))
    engines = pipeline.engine.engines
    if story is None:  # maybe another process of this frontend had it
        route = Route(engine_id, [Visit(engine.address.target) for engine in engines])
    else:
        route = next((each for each in story.routes if each.request_id == engine_id), Route(""))
    parts = await asyncio.gather(*(_ask(engines, visit, engine_id) for visit in route.visits))
    if story is None:
        parts = [part for part in parts if part.HasField("story")]
    if story is None and not parts:
        raise UnknownRequestError("no live request of yours has this id, and no recent one")
    if not _may_see_engines(pipeline.gate):
        for part in parts:
            part.address = ""
    answer = pb.ExplainRequestResponse(engines=parts)
    if story is not None:
        answer.frontend.CopyFrom(_frontend_part(story, route))
    return answer


async def _ask(engines: Sequence[EngineClient], visit: Visit, request_id: str) -> pb.EngineStory:
    part = pb.EngineStory(address=visit.target, left_because=visit.left_because)
    engine = next((each for each in engines if each.address.target == visit.target), None)
    if engine is None:
        part.missing = "the engine is gone"
        return part
    try:
        part.story.CopyFrom(await engine.explain(request_id))
    except EngineUnavailableError as error:
        part.missing = str(error)
    return part


def _frontend_part(story: RequestStory, route: Route) -> pb.FrontendStory:
    now_s = time.monotonic() if story.end_s is None else story.end_s
    part = pb.FrontendStory(
        method=story.method,
        duration_s=now_s - story.start_s,
        end=story.end,
        unread_s=route.unread_s,
    )
    if story.tokenized_s is not None:
        part.tokenize_s = story.tokenized_s - story.start_s
        if story.admitted_s is not None:
            part.submit_s = story.admitted_s - story.tokenized_s
            if story.first_output_s is not None:
                part.first_output_s = story.first_output_s - story.admitted_s
                part.stream_s = now_s - story.first_output_s
    return part


def _may_see_engines(gate: Gate) -> bool:
    try:
        gate.check_may_list_engines()
    except NotPermittedError:
        return False
    return True
