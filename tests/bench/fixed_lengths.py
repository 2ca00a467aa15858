"""Output tokens a second at fixed lengths: `python -m tests.bench.fixed_lengths`.

    python -m tests.bench.fixed_lengths --shape gpt-oss-20b --lengths 1024x1024,1024x8192
    python -m tests.bench.fixed_lengths --shape gpt-oss-20b --lengths 1024x1024 --whole 3000

The conditions of trtllm-bench, which NVIDIA's tables are made with: random ids, exact lengths, no
prefix is used again, no end of sequence. --whole N submits N requests and waits for the last, as it
does. The default measures the steady state in between in less time: the first requests begin at
even distances from their end, with what they would have made as a part of their prompts, others
follow in full length, and tokens count from when no prompt of the first is left.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

import numpy as np

from services.engine.request import Request, RequestOutput, RequestStatus
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, make_parser
from tests.bench.workload import Job

DEFAULTS = PEER_SETTINGS | {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "max_num_mixed_tokens": 8192,
    "max_num_waiting": 1 << 20,
}
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its output."""

    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


def read_lengths(text: str) -> list[Lengths]:
    """Reads "1024x1024,8192x1024"."""
    return [Lengths(*map(int, part.split("x"))) for part in text.split(",")]


def make_jobs(lengths: Lengths, num_first: int, count: int, vocab_size: int) -> Iterator[Job]:
    """Yields requests of random ids, the first of them at even distances from their end."""
    drawn = np.random.default_rng(1)
    for number in range(count):
        made = number * lengths.output // num_first if number < num_first else 0
        prompt = drawn.integers(vocab_size, size=lengths.prompt + made).tolist()
        yield Job(prompt, lengths.output - made)


class Ends:
    """Counts the ends of requests; a sink."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.error = ""

    def put(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        if output.is_last:
            self.num_ended += 1
            self.error = self.error or ("" if output.error is None else str(output.error))

    def flush(self) -> None:
        """Does nothing: the program looks at times of its own."""


def num_tokens(engine: OfflineEngine) -> int:
    """Returns the output tokens of all requests so far."""
    return engine.core.counters.scheduler.output_tokens


async def measure_lengths(
    settings: Settings, report: Report, engine: OfflineEngine, lengths: Lengths
) -> None:
    """Measures one row."""
    arguments = settings.arguments
    num_first = (
        0 if arguments.whole else min(settings.config.scheduler.max_num_seqs, arguments.first)
    )
    count = arguments.whole or 4 * num_first
    ends = Ends()
    jobs = make_jobs(lengths, num_first, count, settings.model.vocab_size)
    requests = [engine.request(job, ends) for job in jobs]
    num_preemptions = engine.core.counters.scheduler.num_preemptions
    started_s = time.perf_counter()
    for request in requests:
        request.arrival_s = time.monotonic()
        engine.core.submit(request)
    deadline_s = started_s + arguments.row_s
    while not arguments.whole and have_prompts(requests) and time.perf_counter() < deadline_s:  # noqa: ASYNC110  an engine reports no end of prompts
        await asyncio.sleep(POLL_S)
    begin_s, first = time.perf_counter(), num_tokens(engine)
    running = []
    while time.perf_counter() < min(begin_s + arguments.seconds, deadline_s) or arguments.whole:
        await asyncio.sleep(POLL_S)
        load = engine.core.load()
        if (not load.num_waiting and not arguments.whole) or ends.num_ended == count:
            break
        running.append(load.num_running)
    elapsed_s, made = time.perf_counter() - begin_s, num_tokens(engine) - first
    num_ended = ends.num_ended
    await abort(engine, requests, ends)
    if ends.error:
        report.problem(f"{lengths}: {ends.error}")
    rate = made / elapsed_s
    report.add(f"{lengths}, output", [rate], "tokens/s", "higher")
    report.add(
        f"{lengths}, output of a GPU",
        [rate / settings.config.parallel.num_ranks],
        "tokens/s",
        "higher",
    )
    if running:
        report.add(f"{lengths}, output of a user", [rate / mean(running)], "tokens/s", "higher")
    report.state(
        str(lengths),
        {
            "seconds": round(elapsed_s, 1),
            "before": round(begin_s - started_s, 1),
            "running": round(mean(running), 1) if running else 0,
            "requests": count,
            "ended": num_ended,
            "preemptions": engine.core.counters.scheduler.num_preemptions - num_preemptions,
        },
    )


def have_prompts(requests: list[Request]) -> bool:
    """Whether a running request has no token yet, or none runs."""
    running = [each for each in requests if each.status is RequestStatus.RUNNING]
    return not running or not all(each.num_output_tokens for each in running)


async def abort(engine: OfflineEngine, requests: list[Request], ends: Ends) -> None:
    """Ends what is left, and returns when the engine is idle."""
    for request in requests:
        engine.core.abort(request)
    while ends.num_ended < len(requests) or engine.core.load().num_running:  # noqa: ASYNC110  as above
        await asyncio.sleep(POLL_S)


async def measure(settings: Settings, report: Report) -> None:
    """Measures all rows with one engine."""
    rows = settings.arguments.lengths
    longest = max(each.prompt + each.output for each in rows) + 8
    config = settings.config.with_flags(max_model_len=longest)
    async with offline_engine(config) as engine:
        await engine.wait_until_captured()
        report.state("blocks", engine.core.num_blocks)
        for lengths in rows:
            await measure_lengths(settings, report, engine, lengths)


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--lengths",
        type=read_lengths,
        default=read_lengths("1024x1024,1024x8192,8192x1024,32768x1024"),
        help="tokens of prompt and output of each row",
    )
    parser.add_argument("--seconds", type=float, default=30, help="that tokens are counted for")
    parser.add_argument("--row-s", type=float, default=100, help="most time of a row")
    parser.add_argument("--first", type=int, default=1 << 20, help="most requests at the beginning")
    parser.add_argument("--whole", type=int, default=0, help="requests, all from begin to end")
    return parser


def main() -> None:
    """Measures and prints."""
    run_program("fixed_lengths", own_parser(), measure, defaults=DEFAULTS)


if __name__ == "__main__":
    main()
