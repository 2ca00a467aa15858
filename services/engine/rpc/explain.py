"""The story of a request as protobuf."""

from protos.common.v1 import request_story_pb2 as pb
from services.engine.core.engine_core import EngineCore
from services.engine.core.recent_requests import RequestStory
from services.engine.errors import UnknownRequestError
from services.engine.request_times import Stage


def explain(core: EngineCore, request_id: str) -> pb.RequestStory:
    """Returns where the time of a live or a recent request went.

    Raises:
        UnknownRequestError: the engine does not remember it.
    """
    story = core.requests.story(request_id)
    if story is None:
        raise UnknownRequestError("no live request has this id, and no recent one")
    message = pb.RequestStory(
        request_id=story.request_id,
        engine_id=core.engine_id,
        duration_s=story.now_s - story.arrival_s,
        end=story.end,
        stages=[
            pb.StageTime(stage=_STAGES[stage], seconds=seconds)
            for stage, seconds in story.seconds.items()
        ],
        stage=None if story.stage is None else _STAGES[story.stage],
        prompt_tokens=story.num_prompt_tokens,
        cached_tokens=story.num_cached_tokens,
        output_tokens=story.num_output_tokens,
        resumed_tokens=story.num_resumed_tokens,
        num_preemptions=story.num_preemptions,
        num_losses=story.num_losses,
        num_recomputed_tokens=story.num_recomputed_tokens,
    )
    _add_steps(message, story)
    if (gap := core.requests.recent.longest_gap(story)) is not None:
        message.longest_gap.seconds = gap.seconds
        message.longest_gap.step_id = gap.step_id
        message.longest_gap.num_tokens = gap.num_tokens
        message.longest_gap.batch_size = gap.batch_size
    return message


def _add_steps(message: pb.RequestStory, story: RequestStory) -> None:
    """Adds what the marks of a request say; each worker counts its own steps."""
    started, first, last = story.started, story.first_token, story.last_token
    if first is None or last is None:
        return
    message.time_to_first_token_s = first.at_s - story.arrival_s
    if started is not None and not story.num_losses:
        message.num_prefill_steps = first.step_id - started.step_id + 1
        message.num_decode_steps = last.step_id - first.step_id


_STAGES = {stage: f"REQUEST_STAGE_{stage.name}" for stage in Stage}
