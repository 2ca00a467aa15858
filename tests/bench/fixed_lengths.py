"""Output tokens a second at fixed lengths: `python -m tests.bench.fixed_lengths`.

    python -m tests.bench.fixed_lengths --shape gpt-oss-20b --lengths 1024x1024,1024x8192
    python -m tests.bench.fixed_lengths --shape gpt-oss-20b --lengths 1024x1024 --whole 3000

The conditions of trtllm-bench, which NVIDIA's tables are made with: random ids, exact lengths, no
prefix is used again, no end of sequence. --whole N submits N requests and waits for the last, as it
does. The default measures the steady state in between in less time: the first requests begin at
even distances from their end, with what they would have made as a part of their prompts, others
follow in full length, always more than can run, and tokens count from when no prompt of the first
is left.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

import numpy as np

from services.engine.request import OutputSink, Request, RequestOutput, RequestStatus
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


def make_jobs(lengths: Lengths, num_first: int, vocab_size: int) -> Iterator[Job]:
    """Yields requests of random ids without end, the first at even distances from their end."""
    drawn = np.random.default_rng(1)
    for number in itertools.count():
        made = number * lengths.output // num_first if number < num_first else 0
        prompt = drawn.integers(vocab_size, size=lengths.prompt + made).tolist()
        yield Job(prompt, lengths.output - made)


class Row(OutputSink):
    """The requests of one row: submits them, and counts their ends as their sink."""

    def __init__(self, engine: OfflineEngine, jobs: Iterator[Job]) -> None:
        self.engine = engine
        self.jobs = jobs
        self.requests: list[Request] = []
        self.num_ended = 0
        self.error = ""

    def put(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        if output.is_last:
            self.num_ended += 1
            self.error = self.error or ("" if output.error is None else str(output.error))

    def flush(self) -> None:
        """Does nothing: the program looks at times of its own."""

    def fill(self, num_open: int) -> None:
        """Submits requests until `num_open` have not ended."""
        count = num_open - (len(self.requests) - self.num_ended)
        requests = [self.engine.request(job, self) for job in itertools.islice(self.jobs, count)]
        self.requests += requests
        for request in requests:
            request.arrival_s = time.monotonic()
            self.engine.core.submit(request)

    def num_tokens(self) -> int:
        """Returns the output tokens of all rows so far."""
        return self.engine.core.counters.scheduler.output_tokens

    async def abort(self) -> None:
        """Ends what is left, and returns when the engine is idle."""
        for request in self.requests:
            self.engine.core.abort(request)
        while self.num_ended < len(self.requests) or self.engine.core.load().num_running:  # noqa: ASYNC110  an engine reports no end of all
            await asyncio.sleep(POLL_S)


async def measure_whole(row: Row, count: int) -> list[int]:
    """Waits until `count` requests have ended, and returns how many ran from time to time."""
    running = []
    row.fill(count)
    while row.num_ended < count:
        await asyncio.sleep(POLL_S)
        running.append(row.engine.core.load().num_running)
    return running


async def begin_steady(row: Row, num_first: int, deadline_s: float) -> None:
    """Submits the first requests, and returns when each that memory holds has a token."""
    row.fill(2 * num_first)
    first = row.requests[:num_first]
    while not have_begun(first) and not row.error and time.perf_counter() < deadline_s:
        await asyncio.sleep(POLL_S)
        row.fill(2 * num_first)


def have_begun(requests: list[Request]) -> bool:
    """Whether some requests have tokens, and none that runs has none."""
    running = [each for each in requests if each.status is RequestStatus.RUNNING]
    begun = any(each.num_output_tokens for each in requests)
    return begun and all(each.num_output_tokens for each in running)


async def measure_steady(row: Row, num_first: int, until_s: float) -> list[int]:
    """Keeps requests waiting until that time and a token, and returns how many ran."""
    running = []
    before = row.num_tokens()
    while not row.error and (time.perf_counter() < until_s or row.num_tokens() == before):
        row.fill(2 * num_first)
        await asyncio.sleep(POLL_S)
        running.append(row.engine.core.load().num_running)
    return running


async def measure_lengths(
    settings: Settings, report: Report, engine: OfflineEngine, lengths: Lengths
) -> None:
    """Measures one row."""
    arguments = settings.arguments
    whole = arguments.whole
    num_first = 0 if whole else min(settings.config.scheduler.max_num_seqs, arguments.first)
    row = Row(engine, make_jobs(lengths, num_first, settings.model.vocab_size))
    num_preemptions = engine.core.counters.scheduler.num_preemptions
    started_s = time.perf_counter()
    deadline_s = started_s + arguments.row_s
    if not whole:
        await begin_steady(row, num_first, deadline_s)
    begin_s, first = time.perf_counter(), row.num_tokens()
    running = await (
        measure_whole(row, whole)
        if whole
        else measure_steady(row, num_first, min(begin_s + arguments.seconds, deadline_s))
    )
    elapsed_s, made = time.perf_counter() - begin_s, row.num_tokens() - first
    num_ended = row.num_ended
    await row.abort()
    if row.error:
        report.problem(f"{lengths}: {row.error}")
    num_ranks = settings.config.parallel.num_ranks
    rate = made / elapsed_s
    for name, value in (
        ("output", rate),
        ("output of a GPU", rate / num_ranks),
        ("output of a user", rate / max(mean(running or [0]), 1)),
    ):
        report.add(f"{lengths}, {name}", [value], "tokens/s", "higher")
    report.state(
        str(lengths),
        {
            "seconds": round(elapsed_s, 1),
            "before": round(begin_s - started_s, 1),
            "running": round(mean(running or [0]), 1),
            "requests": len(row.requests),
            "ended": num_ended,
            "preemptions": engine.core.counters.scheduler.num_preemptions - num_preemptions,
        },
    )


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
