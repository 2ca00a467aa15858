"""Measures what a step of a steady decode costs the service: schedule, update and publish.

    python -m tests.bench.scheduler [--waiting 4096] [--frontends 64] [--states] [--json PATH]

Results are made up beforehand, so no worker's time is counted. `schedule` includes the descriptor's
bytes; `publish` is all from the outputs of a step to the bytes of each session's message, without
gRPC. Steps overlap as they do in the engine, two are in flight, and garbage is collected as it is
there.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from services.engine.batch import step_result
from services.engine.core.live_requests import LiveRequests
from services.engine.core.request_ends import RequestEnds
from services.engine.core.stats import Counters
from services.engine.kv_cache.cache_groups import STATE, LayerGroup
from services.engine.limits import StepLimits
from services.engine.request import OutputSink, Request, RequestOutput
from services.engine.rpc.step_columns import StepColumns
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from services.engine.server import collect_garbage_rarely
from tests.support.fake_worker import VOCAB_SIZE
from tests.support.requests import make_request

BLOCK_SIZE = 16
STEPS_IN_FLIGHT = 2
STATE_GROUPS = tuple(
    LayerGroup(window=window, layers=tuple(range(10 * group, 10 * group + 10)))
    for group, window in enumerate((None, STATE, STATE, STATE))
)
"""Layers of Qwen3.5-35B-A3B: 10 keep tokens and 30 a state."""
STATE_PAGES = 66
"""Blocks of a state of that model in each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the table; times are microseconds per step."""

    num_running: int
    num_waiting: int
    num_frontends: int
    context_len: int
    num_steps: int
    schedule_p50_us: float
    update_p50_us: float
    publish_p50_us: float
    total_p50_us: float
    total_p99_us: float
    total_least_us: float
    descriptor_bytes: int


class Frontend(OutputSink):
    """One frontend's session, whose message is made at the end of each step."""

    def __init__(self) -> None:
        self._columns = StepColumns()
        self.num_bytes = 0

    def put(self, output: RequestOutput) -> None:
        """Takes one request's output."""
        self._columns.add(output)

    def put_tokens(self, requests: Sequence[Request], handles: bytes, token_ids: bytes) -> None:
        """Takes one token of each of several requests."""
        self._columns.add_tokens(handles, token_ids)

    def flush(self) -> None:
        """Makes the step's message."""
        columns, self._columns = self._columns, StepColumns()
        self.num_bytes += len(columns.to_message().SerializeToString())


def measure(
    num_running: int,
    context_len: int,
    num_steps: int,
    num_waiting: int = 0,
    num_frontends: int = 1,
    *,
    has_states: bool = False,
) -> Measurement:
    """Decodes `num_running` requests that have `context_len` tokens each when measuring begins.

    has_states: whether the model has layers with a state, of which snapshots are made.
    """
    sinks = [Frontend() for _ in range(num_frontends)]
    scheduler = _warm_scheduler(
        num_running, context_len, num_steps, num_waiting, sinks, has_states=has_states
    )
    counters = Counters()
    live = LiveRequests(RequestEnds(counters, None), lambda _: None)
    in_flight: deque[ScheduledStep] = deque()
    times_us: dict[str, list[float]] = {"schedule": [], "update": [], "publish": []}
    num_bytes = 0
    gc.collect()
    for _ in range(num_steps + STEPS_IN_FLIGHT):
        with timed(times_us["schedule"]):
            step = scheduler.schedule()
            assert step is not None
            message = step.descriptor.SerializeToString()
        assert len(step.requests) == num_running
        num_bytes += len(message)
        in_flight.append(step)
        if len(in_flight) == STEPS_IN_FLIGHT:
            oldest = in_flight.popleft()
            result = step_result(oldest.step_id, [7] * num_running)
            with timed(times_us["update"]):
                outputs = scheduler.update(oldest, result)
            with timed(times_us["publish"]):
                counters.latencies.count_step(outputs)
                live.publish(outputs)
    num_updates = len(times_us["update"])
    of_updates = (each[-num_updates:] for each in times_us.values())
    totals = [sum(parts) for parts in zip(*of_updates, strict=True)]
    return Measurement(
        num_running=num_running,
        num_waiting=num_waiting,
        num_frontends=num_frontends,
        context_len=context_len,
        num_steps=num_steps,
        **{f"{name}_p50_us": round(statistics.median(v), 1) for name, v in times_us.items()},
        total_p50_us=round(statistics.median(totals), 1),
        total_p99_us=round(statistics.quantiles(totals, n=100)[98], 1),
        total_least_us=round(min(totals), 1),
        descriptor_bytes=num_bytes // (num_steps + STEPS_IN_FLIGHT),
    )


@contextmanager
def timed(times_us: list[float]) -> Iterator[None]:
    """Appends the microseconds of CPU that the block takes."""
    started_ns = time.thread_time_ns()
    yield
    times_us.append((time.thread_time_ns() - started_ns) / 1000)


def _warm_scheduler(
    num_running: int,
    context_len: int,
    num_steps: int,
    num_waiting: int,
    sinks: Sequence[OutputSink],
    *,
    has_states: bool,
) -> Scheduler:
    """Returns a scheduler whose requests have all been prefilled and decode from now on.

    num_waiting: others that no row is left for. sinks: share the requests.
    """
    # Prompts of slightly different length spread the block boundaries over the steps, and with
    # states the snapshots.
    spread = 4 * BLOCK_SIZE if has_states else BLOCK_SIZE
    num_tokens = context_len + num_steps + spread + 2 * STEPS_IN_FLIGHT
    num_states = 5 if has_states else 0  # a live one and what steady decodes keep
    scheduler = Scheduler(
        StepLimits(
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * context_len,
            max_model_len=num_tokens + 1,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            layer_groups=STATE_GROUPS if has_states else (),
            state_pages=STATE_PAGES if has_states else 0,
        ),
        num_blocks=num_running * (num_tokens // BLOCK_SIZE + 2 + num_states * 3 * STATE_PAGES),
        max_num_waiting=max(num_running, num_waiting),
    )
    requests = [
        make_request(context_len - i % spread, max_tokens=num_tokens - context_len)
        for i in range(num_running)
    ]
    for i, request in enumerate(requests):
        request.sink = sinks[i % len(sinks)]
        scheduler.add(request)
    # With states a prompt takes a step to its last snapshot and another to its end.
    while not all(request.num_output_tokens for request in requests):
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(step, step_result(step.step_id, [7] * len(step.requests)))
    for _ in range(num_waiting):
        scheduler.add(make_request(context_len, max_tokens=num_tokens - context_len))
    return scheduler


def main() -> None:
    """Prints the table and writes it as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait besides")
    parser.add_argument("--frontends", type=int, default=1, help="sessions that share the requests")
    parser.add_argument("--states", action="store_true", help="of a model whose layers keep some")
    parser.add_argument("--steps", type=int, default=500, help="steps measured on each line")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    collect_garbage_rarely()
    print("CPU us per step:")
    print("running  context  schedule  update  publish  total p50      p99    least   bytes")
    measurements = []
    for context_len in args.context:
        for num_running in args.running:
            m = measure(
                num_running,
                context_len,
                args.steps,
                args.waiting,
                args.frontends,
                has_states=args.states,
            )
            measurements.append(m)
            print(
                f"{m.num_running:7}  {m.context_len:7}  {m.schedule_p50_us:8.1f}  "
                f"{m.update_p50_us:6.1f}  {m.publish_p50_us:7.1f}  {m.total_p50_us:9.1f}  "
                f"{m.total_p99_us:7.1f}  {m.total_least_us:7.1f}  {m.descriptor_bytes:6}"
            )
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(m) for m in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
