"""Measures what scheduling costs per step: schedule() and update() of a steady decode.

    python -m tests.bench.scheduler [--waiting 4096] [--json PATH]

Results are made up beforehand, so no worker's time is counted. Steps overlap as they do in the
engine, two are in flight, and garbage is collected as it is there.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from services.engine.batch import step_result
from services.engine.limits import StepLimits
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from services.engine.server import collect_garbage_rarely
from tests.support.fake_worker import VOCAB_SIZE
from tests.support.requests import make_request

BLOCK_SIZE = 16
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the table; times are microseconds per step."""

    num_running: int
    num_waiting: int
    context_len: int
    num_steps: int
    schedule_p50_us: float
    update_p50_us: float
    total_p50_us: float
    total_p99_us: float
    descriptor_bytes: int


def measure(
    num_running: int, context_len: int, num_steps: int, num_waiting: int = 0
) -> Measurement:
    """Decodes `num_running` requests that have `context_len` tokens each when measuring begins."""
    scheduler = _warm_scheduler(num_running, context_len, num_steps, num_waiting)
    in_flight: deque[ScheduledStep] = deque()
    schedule_us, update_us, num_bytes = [], [], 0
    gc.collect()
    for _ in range(num_steps + STEPS_IN_FLIGHT):
        started_ns = time.perf_counter_ns()
        step = scheduler.schedule()
        schedule_us.append((time.perf_counter_ns() - started_ns) / 1000)
        assert step is not None
        assert len(step.requests) == num_running
        num_bytes += step.descriptor.ByteSize()
        in_flight.append(step)
        if len(in_flight) == STEPS_IN_FLIGHT:
            oldest = in_flight.popleft()
            result = step_result(oldest.step_id, [7] * num_running)
            started_ns = time.perf_counter_ns()
            scheduler.update(oldest, result)
            update_us.append((time.perf_counter_ns() - started_ns) / 1000)
    totals = [a + b for a, b in zip(schedule_us[1:], update_us, strict=True)]
    return Measurement(
        num_running=num_running,
        num_waiting=num_waiting,
        context_len=context_len,
        num_steps=num_steps,
        schedule_p50_us=round(statistics.median(schedule_us), 1),
        update_p50_us=round(statistics.median(update_us), 1),
        total_p50_us=round(statistics.median(totals), 1),
        total_p99_us=round(statistics.quantiles(totals, n=100)[98], 1),
        descriptor_bytes=num_bytes // len(schedule_us),
    )


def _warm_scheduler(
    num_running: int, context_len: int, num_steps: int, num_waiting: int = 0
) -> Scheduler:
    """Returns a scheduler whose requests have all been prefilled and decode from now on.

    num_waiting: others that no row is left for.
    """
    num_tokens = context_len + num_steps + 2 * STEPS_IN_FLIGHT
    scheduler = Scheduler(
        StepLimits(
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running * context_len,
            max_model_len=num_tokens + 1,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
        ),
        num_blocks=num_running * (num_tokens // BLOCK_SIZE + 2),
        max_num_waiting=max(num_running, num_waiting),
    )
    # Prompts of slightly different length spread the block boundaries over the steps.
    for i in range(num_running):
        scheduler.add(
            make_request(context_len - i % BLOCK_SIZE, max_tokens=num_tokens - context_len)
        )
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, step_result(step.step_id, [7] * num_running))
    for _ in range(num_waiting):
        scheduler.add(make_request(context_len, max_tokens=num_tokens - context_len))
    return scheduler


def main() -> None:
    """Prints the table and writes it as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait besides")
    parser.add_argument("--steps", type=int, default=500, help="steps measured on each line")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    args = parser.parse_args()
    collect_garbage_rarely()
    print("running  context  schedule  update  total p50  total p99 (us per step)  bytes")
    measurements = []
    for context_len in args.context:
        for num_running in args.running:
            m = measure(num_running, context_len, args.steps, args.waiting)
            measurements.append(m)
            print(
                f"{m.num_running:7}  {m.context_len:7}  {m.schedule_p50_us:8.1f}  "
                f"{m.update_p50_us:6.1f}  {m.total_p50_us:9.1f}  {m.total_p99_us:9.1f}"
                f"                {m.descriptor_bytes:7}"
            )
            sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(m) for m in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
