"""Gaps between tokens while an engine compiles and captures: `python -m tests.bench.busy_start`.

    python -m tests.bench.busy_start --shape deepseek-v3 --num-layers 6 --streams 8 [engine flags]

An engine starts with empty caches, and --streams requests decode from the moment it is ready. The
figures are the gaps between two tokens of a request while the model is compiled, while graphs are
captured (at most --capturing-s seconds: graphs that no step has missed take their time), and in the
--after-s seconds that follow, of whatever of these there is.
"""

import asyncio
import math
import time

from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams
from tests.bench.empty_caches import empty_caches
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import Settings, make_parser

PROMPT_LENGTH = 16
POLL_S = 0.01
NUM_LONGEST = 24
"""Gaps to report one by one."""


class _Stream(OutputSink):
    """The times of one request's tokens."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.is_done = False

    def put(self, output: RequestOutput) -> None:
        self.is_done = output.is_last
        if output.token_ids:
            self.times_s.append(time.perf_counter())

    def flush(self) -> None:
        """Does nothing: no task waits for tokens here."""


class Streams:
    """Requests that decode all the while, each followed by another."""

    def __init__(self, engine: OfflineEngine, count: int, max_model_len: int) -> None:
        self._engine = engine
        self._max_tokens = max_model_len - PROMPT_LENGTH
        self._num_submitted = 0
        self._live: dict[_Stream, Request] = {}
        self.streams = [self._submit() for _ in range(count)]

    def replace_finished(self) -> None:
        """Submits a request for each that has reached its end."""
        for stream in [stream for stream in self.streams if stream.is_done]:
            self.streams.append(self._submit())
            stream.is_done = False
            del self._live[stream]

    async def watch(self, begin_s: float, seconds: float) -> float:
        """Lets time pass, more of it if there is no gap, and returns when the period ended."""
        end_s = begin_s + seconds
        while (now_s := time.perf_counter()) < end_s or not self.gaps_ms(begin_s, now_s):
            self.replace_finished()
            await asyncio.sleep(POLL_S)
        return now_s

    async def end(self) -> None:
        """Aborts all requests and waits until none runs."""
        for stream, request in self._live.items():
            if not stream.is_done:
                self._engine.core.abort(request)
        while self._engine.core.stats().load.num_running:  # noqa: ASYNC110  an engine reports no ends
            await asyncio.sleep(POLL_S)

    def gaps_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Returns the gaps between tokens that ended in a period."""
        return [
            1000 * (later - earlier)
            for stream in self.streams
            for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)
            if begin_s <= later < end_s
        ]

    def longest(self, begin_s: float, end_s: float) -> str:
        """Names the longest gaps of a period, each with the seconds from its begin to the gap's."""
        gaps = {
            (round(earlier - begin_s, 1), round(1000 * (later - earlier)))
            for stream in self.streams
            for earlier, later in zip(stream.times_s, stream.times_s[1:], strict=False)
            if begin_s <= later < end_s
        }
        most = sorted(sorted(gaps, key=lambda each: each[1])[-NUM_LONGEST:])
        return ", ".join(f"{milliseconds} ms after {seconds} s" for seconds, milliseconds in most)

    def _submit(self) -> _Stream:
        self._num_submitted += 1
        stream = _Stream()
        request = Request(
            request_id=f"stream-{self._num_submitted}",
            handle=self._num_submitted,
            prompt_token_ids=[1 + self._num_submitted] * PROMPT_LENGTH,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=self._max_tokens),
            sink=stream,
            arrival_s=time.monotonic(),
        )
        self._engine.core.submit(request)
        self._live[stream] = request
        return stream


async def measure(settings: Settings, report: Report) -> None:
    """Starts an engine, watches it, and reports each period."""
    arguments = settings.arguments
    with empty_caches() as folder:
        async with offline_engine(settings.config.with_flags(compile_cache_dir=folder)) as engine:
            streams = Streams(engine, arguments.streams, settings.max_model_len)
            moments = [time.perf_counter()]
            num_planned = engine.core.stats().graphs.num_planned
            for num_graphs, limit_s in ((1, math.inf), (num_planned, arguments.capturing_s)):
                end_s = moments[-1] + limit_s
                while (
                    len(engine.graph_figures()) < min(num_graphs, num_planned)
                    and time.perf_counter() < end_s
                ):
                    streams.replace_finished()
                    await asyncio.sleep(POLL_S)
                moments.append(time.perf_counter())
            moments.append(await streams.watch(moments[-1], arguments.after_s))
    periods = zip(("compiling", "capturing", "afterwards"), moments, moments[1:], strict=False)
    for name, begin_s, end_s in periods:
        gaps = sorted(streams.gaps_ms(begin_s, end_s))
        report.state(name, f"{end_s - begin_s:.1f} s, {len(gaps)} gaps")
        if gaps:
            report.add(f"{name}: median", [gaps[len(gaps) // 2]], "ms")
            report.add(f"{name}: 99 %", [gaps[int(0.99 * len(gaps))]], "ms")
            report.add(f"{name}: longest", [gaps[-1]], "ms")
            report.state(f"{name}: most", streams.longest(begin_s, end_s))


def main() -> None:
    """Measures and prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=8, help="requests that decode")
    parser.add_argument("--capturing-s", type=float, default=20.0, help="most of it to watch")
    parser.add_argument("--after-s", type=float, default=5.0, help="time to measure at the end")
    run_program("busy_start", parser, measure)


if __name__ == "__main__":
    main()
