"""The requests of a lost worker: they continue on the next one, run alone there, or end.

Any request of the last steps may be the cause, unless the worker was killed from outside. All of
them are suspects: each runs alone on the next worker until it has sampled the tokens it was about
to sample. If that worker is lost too, the request is at fault: it ends, and the same request is
refused for some time. See docs/decisions/0007-suspects-run-alone.md.
"""

import asyncio
import hashlib
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import structlog

from services.engine.core.live_requests import LiveRequests
from services.engine.core.step_loop import StepLoop
from services.engine.errors import (
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestFaultError,
)
from services.engine.request import Request, RequestOutput
from services.engine.request_times import Stage
from services.engine.scheduler.recovery import lose_worker
from services.engine.scheduler.step_outputs import StepOutputs

log = structlog.get_logger()

MAX_LOSSES = 3
"""Losses of workers with a request in their last steps that end the request."""
REFUSED_FOR_S = 600.0
"""Time for which a request at fault is refused."""
MAX_REFUSED = 1024
"""Most refused requests; the oldest is forgotten first."""


class Survivors:
    """Keeps the live requests from one worker to the next."""

    def __init__(
        self,
        live: LiveRequests,
        *,
        time_limit_s: float,
        end: Callable[[Request, EngineError], None],
    ) -> None:
        """Starts without a loss.

        Args:
            live: the engine's requests.
            time_limit_s: longest wait for the next worker; then the requests end.
            end: ends one request.
        """
        self._live = live
        self._time_limit_s = time_limit_s
        self._end = end
        self._refused_until_s: dict[bytes, float] = {}
        self._give_up_s: float | None = None
        self._giving_up: asyncio.TimerHandle | None = None

    def check(self, request: Request) -> None:
        """Raises RequestFaultError if the same request caused a recent loss."""
        if not self._refused_until_s:
            return
        until_s = self._refused_until_s.get(_fingerprint(request), 0.0)
        if time.monotonic() < until_s:
            error = RequestFaultError("the same request cost two workers their lives not long ago")
            log.error(
                "request_was_refused",
                request_id=request.request_id,
                error_id=error.error_id,
                reason=error.reason,
            )
            raise error

    def take(self, in_flight: set[Request], *, was_killed: bool, has_progressed: bool) -> None:
        """Judges the live requests after a worker was lost.

        Args:
            in_flight: the requests of its last steps.
            was_killed: whether it was killed from outside; then no request is a suspect.
            has_progressed: whether it had finished a step, which restarts the time limit.
        """
        num_live = len(self._live)
        for request in self._live.all():
            request.times.enter(Stage.NO_WORKER)
        for request in in_flight.intersection(self._live.all()):
            self._judge(request, was_killed=was_killed, is_alone=len(in_flight) == 1)
        if not num_live:
            return
        log.warning(
            "requests_lost_their_worker",
            num_kept=len(self._live),
            num_suspects=sum(request.is_suspect for request in self._live.all()),
            num_ended=num_live - len(self._live),
        )
        now_s = time.monotonic()
        if has_progressed or self._give_up_s is None:
            self._give_up_s = now_s + self._time_limit_s
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(max(0.0, self._give_up_s - now_s), self._give_up)

    def hand_over(self, steps: StepLoop) -> None:
        """Gives all live requests to the next worker's scheduler, whose loop may run already."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        refused: list[RequestOutput] = []
        for request in self._live.all():
            try:
                steps.scheduler.resume(request)
            except InvalidRequestError as error:
                # This scheduler never had the request, so it cannot abort it.
                refused.append(RequestOutput(request, [], error=EngineUnavailableError(str(error))))
        self._live.publish(StepOutputs(others=refused))
        steps.wake()

    def _judge(self, request: Request, *, was_killed: bool, is_alone: bool) -> None:
        """Ends a request of the last steps, or makes it a suspect."""
        was_suspect = request.is_suspect
        lose_worker(request, was_killed=was_killed)
        if is_alone and was_suspect and not was_killed:
            self._refuse(request)
            reason = "it cost two workers their lives, the second one when it ran alone"
            self._end(request, RequestFaultError(reason))
        elif request.num_losses >= MAX_LOSSES:
            self._end(
                request,
                EngineUnavailableError(
                    f"the engine lost {request.num_losses} workers while they ran this request"
                ),
            )

    def _refuse(self, request: Request) -> None:
        if len(self._refused_until_s) >= MAX_REFUSED:
            del self._refused_until_s[next(iter(self._refused_until_s))]
        self._refused_until_s[_fingerprint(request)] = time.monotonic() + REFUSED_FOR_S

    def _give_up(self) -> None:
        error = EngineUnavailableError(
            f"the engine lost its worker and had no other one within {self._time_limit_s} s"
        )
        for request in self._live.all():
            self._end(request, error)


def _fingerprint(request: Request) -> bytes:
    """Returns a hash of a request's prompt and sampling, without the seed."""
    digest = hashlib.blake2b(array("i", request.prompt_token_ids).tobytes(), digest_size=16)
    digest.update(repr(replace(request.sampling, seed=0)).encode())
    return digest.digest()
