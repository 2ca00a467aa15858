"""Runs a load and times it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.client.bench.target import Target
from services.client.bench.workload import Load, PlannedRequest, plan
from services.client.errors import OctavoError


@dataclass(slots=True, kw_only=True)
class Timing:
    """Times and outcome of one request; seconds."""

    prompt_tokens: int
    output_tokens: int = 0
    ttft_s: float | None = None
    """From asking to the first token; None if none came."""
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens. Tokens that came in one message share the time since the one before."""
    elapsed_s: float = 0.0
    """From asking to the end."""
    error: OctavoError | None = None
    """The error that it ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A benchmark that was run."""

    timings: list[Timing]
    elapsed_s: float


async def run(target: Target, load: Load, on_done: Callable[[int], None]) -> Run:
    """Sends a load's requests.

    Args:
        target: where they go.
        load: what to send.
        on_done: called after each request with the number that are done.
    """
    requests = plan(load)
    # Connects and warms both ends up, outside of what is measured.
    await _time(target, PlannedRequest(arrival_s=0, prompt_tokens=8, output_tokens=2, seed=0))
    slots = asyncio.Semaphore(load.concurrency if load.rate is None else len(requests))
    started = time.perf_counter()
    num_done = 0

    async def one(request: PlannedRequest) -> Timing:
        nonlocal num_done
        await asyncio.sleep(started + request.arrival_s - time.perf_counter())
        async with slots:
            timing = await _time(target, request)
        num_done += 1
        on_done(num_done)
        return timing

    timings = await asyncio.gather(*(one(request) for request in requests))
    return Run(timings=timings, elapsed_s=time.perf_counter() - started)


async def _time(target: Target, request: PlannedRequest) -> Timing:
    timing = Timing(prompt_tokens=request.prompt_tokens)
    started = last = time.perf_counter()
    try:
        async for num_tokens in target.stream(request):
            if not num_tokens:
                continue
            now = time.perf_counter()
            if timing.ttft_s is None:
                timing.ttft_s = now - started
                timing.gaps_s.extend([0.0] * (num_tokens - 1))
            else:
                timing.gaps_s.extend([(now - last) / num_tokens] * num_tokens)
            timing.output_tokens += num_tokens
            last = now
    except OctavoError as error:
        timing.error = error
    timing.elapsed_s = time.perf_counter() - started
    return timing
