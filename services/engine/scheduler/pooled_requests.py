"""Ends requests whose prompts are computed and pooled."""

import numpy as np

from services.engine.batch import StepResult, read_float32
from services.engine.errors import RequestFaultError
from services.engine.request import FinishReason, RequestOutput, RequestStatus, StepMark
from services.engine.scheduler.holdings import Holdings
from services.engine.scheduler.planned_step import ScheduledStep


def end_pooled(
    step: ScheduledStep, result: StepResult, holdings: Holdings, *, at_s: float
) -> list[RequestOutput]:
    """Ends the requests whose last tokens a step computed, each with its vector.

    Args:
        step: the oldest step in flight.
        result: its result, with a vector for each of these requests.
        holdings: has the requests.
        at_s: the time.

    Returns:
        One output for each of them that is still live.
    """
    if not step.requests:
        return []
    mark = StepMark(step.step_id, at_s)
    vectors = read_float32(result.pooled).reshape(len(step.requests), -1)
    outputs: list[RequestOutput] = []
    for request, vector in zip(step.requests, vectors, strict=True):
        if request.status is RequestStatus.FINISHED:
            continue
        request.num_pending_tokens -= 1
        request.first_token = request.last_token = mark
        holdings.end(request)
        output = RequestOutput(request, [])
        if np.isfinite(vector).all():
            output.vector, output.finish_reason = vector.tobytes(), FinishReason.STOP
        else:
            output.error = RequestFaultError("an element of its vector was NaN or infinite")
        outputs.append(output)
    holdings.drop_ended()
    return outputs
