"""Latency of requests that arrive one by one: `python -m tests.bench.arrivals`.

    python -m tests.bench.arrivals --shape qwen3-8b --rates 12,24 --out out.json [engine flags]

Requests of the serving workload arrive at random times (Poisson), at each rate for --seconds; then
the program waits for the last token. Scheduler and worker run as in the service, without gRPC, and
steps have its lengths. The figures, each as its median, 90th and 99th percentile:

- first token: from a request's arrival to its first token.
- between tokens: every gap between two tokens of a request.
- per token: a request's time from its first to its last token, over the tokens after the first.
"""

import asyncio
import time
from collections.abc import Sequence

from services.engine.errors import EngineError
from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams
from tests.bench.offline_engine import EngineFailedError, OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, make_parser
from tests.bench.workload import Job, arrival_times, fitted, serving_jobs

PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
DEFAULTS = {name: value for name, value in PEER_SETTINGS.items() if not name.startswith("max_num_")}
"""Without the peer's long steps: those of the service are shorter, for the sake of latency."""


class _Stream(OutputSink):
    """One request: when it came and when its tokens did, in seconds of time.perf_counter()."""

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.times_s: list[float] = []
        self.num_tokens = 0
        self.error = ""
        self.is_done = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if output.token_ids:
            self.times_s.append(time.perf_counter())
            self.num_tokens += len(output.token_ids)
        if output.error is not None:
            self.error = str(output.error)
        if output.is_last:
            self.is_done.set()

    def flush(self) -> None:
        """Does nothing: no task waits for single tokens here."""


async def run_rate(
    engine: OfflineEngine, jobs: Sequence[Job], times_s: Sequence[float]
) -> list[_Stream]:
    """Submits each job at its time, greedy and to its full length, and waits for all.

    times_s: from now on, ascending.

    Raises:
        EngineFailedError: a request failed or was refused.
    """
    begin_s, begin_monotonic_s = time.perf_counter(), time.monotonic()
    streams = []
    for job, time_s in zip(jobs, times_s, strict=True):
        await asyncio.sleep(begin_s + time_s - time.perf_counter())
        # A late submission is part of the wait.
        stream = _Stream(begin_s + time_s)
        request = Request(
            request_id=f"arrival-{begin_s}-{len(streams)}",
            handle=len(streams) + 1,
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=job.num_output),
            sink=stream,
            arrival_s=begin_monotonic_s + time_s,
        )
        try:
            engine.core.submit(request)
        except EngineError as error:
            raise EngineFailedError(f"the engine refused a request: {error}") from error
        streams.append(stream)
    for stream in streams:
        await stream.is_done.wait()
        if stream.error:
            raise EngineFailedError(stream.error)
    return streams


def add_figures(report: Report, rate: float, streams: Sequence[_Stream]) -> None:
    """Reports one rate's latencies in milliseconds, and its throughput."""
    first = [each.times_s[0] - each.arrival_s for each in streams]
    gaps = [
        later - earlier
        for each in streams
        for earlier, later in zip(each.times_s, each.times_s[1:], strict=False)
    ]
    per_token = [
        (each.times_s[-1] - each.times_s[0]) / (each.num_tokens - 1)
        for each in streams
        if each.num_tokens > 1
    ]
    named = {"first token": first, "between tokens": gaps, "per token": per_token}
    for name, seconds in named.items():
        ordered = sorted(seconds)
        for percentile, share in PERCENTILES.items():
            if ordered:
                at = min(len(ordered) - 1, int(share * len(ordered)))
                report.add(f"{rate:g}/s: {name}, {percentile}", [1000 * ordered[at]], "ms")
    elapsed_s = max(each.times_s[-1] for each in streams) - min(each.arrival_s for each in streams)
    num_tokens = sum(each.num_tokens for each in streams)
    report.add(f"{rate:g}/s: throughput", [num_tokens / elapsed_s], "tokens/s", "higher")


async def measure(settings: Settings, report: Report) -> None:
    """Starts an engine and sends it the requests of each rate, one rate after the other."""
    arguments = settings.arguments
    limits = {"vocab_size": settings.model.vocab_size, "max_model_len": settings.max_model_len}
    async with offline_engine(settings.config) as engine:
        await engine.wait_until_captured()
        # Starts what the first requests start: it is measured elsewhere.
        await engine.generate(fitted(serving_jobs(8), **limits, divide_by=8))
        for rate in arguments.rates:
            times_s = arrival_times(rate, arguments.seconds)
            jobs = fitted(serving_jobs(len(times_s)), **limits, divide_by=arguments.divide_by)
            before = engine.graph_use()
            streams = await run_rate(engine, jobs, times_s)
            report.state(f"{rate:g}/s: requests", len(streams))
            report.state(f"{rate:g}/s: steps", engine.graph_use().since(before))
            add_figures(report, rate, streams)


def _rates(text: str) -> list[float]:
    """Reads "12,24.5"."""
    return [float(part) for part in text.split(",") if part]


def main() -> None:
    """Measures and prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--rates", type=_rates, default=[12, 24, 36], help="requests a second")
    parser.add_argument("--seconds", type=float, default=16.0, help="for which they arrive")
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    run_program("arrivals", parser, measure, defaults=DEFAULTS)


if __name__ == "__main__":
    main()
