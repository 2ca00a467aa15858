"""Sessions of several turns over one system prompt, like a coding agent's.

    python -m tests.bench.turns --shape qwen3.5-35b-a3b [--sessions 48] [--turns 6] [--system 3000]
        [--repeats 2] [engine flags, such as --num-speculative-tokens 3]
    python -m tests.bench.turns --shape qwen3-8b --system 16000

A turn adds 64 to 1,024 tokens to all that was said before, prompts and outputs, and asks for 64 to
256 tokens, greedy; the next turn of a session begins when it has ended. Of models with states the
report also has the snapshots, the prompt tokens that were said before and are computed again, and
the time of copying a snapshot, which the same copies take on the device after the engine has ended.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from models.state_cache import copy_blocks
from services.engine.errors import EngineError
from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams
from tests.bench.offline_engine import EngineFailedError, OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import Settings, make_parser
from tests.bench.workload import splitmix64, token_ids

DEFAULTS: dict[str, object] = {
    "max_model_len": 24576, "gpu_memory_utilization": 0.85, "log_level": "warning",
}  # fmt: skip
"""Settings of the engine, which flags override; all else is the engine's own default."""
SYSTEM_SEED, SESSION_SEED = 9000, 77000
"""Seeds of the first run's system prompt and first session."""
COPIES, ROUNDS = 8, 5
"""Snapshots between which a copy walks, and times of all of them."""


@dataclass(slots=True, eq=False)
class Turn(OutputSink):
    """A request and the times of its tokens; receives its outputs."""

    num_said: int
    started_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: RequestOutput) -> None:
        """Takes a step's tokens."""
        if output.token_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
        if output.is_last:
            self.error = "" if output.error is None else str(output.error)
            self.done.set()

    def flush(self) -> None:
        """Ignores the end of a step."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the sessions; lengths are divided by `divide_by`, ids taken modulo `vocab_size`."""

    num_sessions: int
    num_turns: int
    num_system: int
    vocab_size: int
    divide_by: int = 1

    def system_prompt(self, run: int) -> list[int]:
        """Returns the tokens with which all sessions of a run begin."""
        return self._draw(splitmix64(SYSTEM_SEED + run), self.num_system)

    def turns(self, run: int, session: int) -> Iterator[tuple[list[int], int]]:
        """Yields what each turn adds, and how many tokens it asks for."""
        numbers = splitmix64(SESSION_SEED + 1000 * run + session)
        for _ in range(self.num_turns):
            added = self._draw(numbers, 64 + next(numbers) % 961)
            yield added, max(2, (64 + next(numbers) % 193) // self.divide_by)

    def _draw(self, numbers: Iterator[int], count: int) -> list[int]:
        drawn = [each % self.vocab_size for each in token_ids(numbers, count)]
        return drawn[: max(1, count // self.divide_by)]


class Sessions:
    """Runs a workload's sessions on an engine."""

    def __init__(self, engine: OfflineEngine, workload: Workload) -> None:
        self._engine = engine
        self._workload = workload
        self._num_requests = 0

    async def warm_up(self) -> None:
        """Runs a few unlike requests and waits for the graphs."""
        size = self._workload.vocab_size
        prompts = ([(31 * i + j) % size for j in range(200)] for i in range(8))
        await asyncio.gather(*(self._take(list(prompt), 16, 0) for prompt in prompts))
        await self._engine.wait_until_captured()

    async def run(self, run: int) -> tuple[float, list[tuple[Turn, Request]]]:
        """Runs all sessions; returns the seconds and the turns.

        Raises:
            EngineFailedError: a request failed or was refused.
        """
        started_s = time.perf_counter()
        system = self._workload.system_prompt(run)
        sessions = (self._session(run, each, system) for each in range(self._workload.num_sessions))
        turns = [turn for session in await asyncio.gather(*sessions) for turn in session]
        return time.perf_counter() - started_s, turns

    async def _session(
        self, run: int, session: int, system: Sequence[int]
    ) -> list[tuple[Turn, Request]]:
        said, turns = list(system), []
        # The first session says the system prompt, the others find it said.
        num_said = len(said) if session else 0
        for added, num_output in self._workload.turns(run, session):
            turn, request = await self._take([*said, *added], num_output, num_said)
            turns.append((turn, request))
            said = list(request.token_ids)
            num_said = len(said)
        return turns

    async def _take(
        self, prompt: list[int], num_output: int, num_said: int
    ) -> tuple[Turn, Request]:
        self._num_requests += 1
        turn = Turn(num_said, started_s=time.perf_counter())
        request = Request(
            request_id=f"turn-{self._num_requests}", handle=self._num_requests,
            prompt_token_ids=prompt, sink=turn, arrival_s=time.monotonic(),
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=num_output),
        )  # fmt: skip
        try:
            self._engine.core.submit(request)
        except EngineError as error:
            raise EngineFailedError(f"the engine refused a request: {error}") from error
        await turn.done.wait()
        if turn.error:
            raise EngineFailedError(turn.error)
        return turn, request


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, and what 90 and 99 of 100 values do not exceed."""
    ordered = sorted(values)
    places = {name: min(len(ordered) - 1, int(len(ordered) * part / 100)) for name, part in
              (("median", 50), ("p90", 90), ("p99", 99))}  # fmt: skip
    return {name: ordered[place] for name, place in places.items()}


def add_times(report: Report, rounds: Sequence[tuple[float, list[tuple[Turn, Request]]]]) -> None:
    """Reports seconds, times to the first token and of later ones, and the cached share."""
    report.add("elapsed", [elapsed_s for elapsed_s, _ in rounds], "s")
    for name, values in (
        ("first token", [[t.first_s - t.started_s for t, _ in turns] for _, turns in rounds]),
        ("later token", [[_per_token(*turn) for turn in turns] for _, turns in rounds]),
    ):
        parts = [percentiles(each) for each in values]
        for part in parts[0]:
            report.add(f"{name}, {part}", [each[part] * 1e3 for each in parts], "ms")
    prompts = [sum(r.num_prompt_tokens for _, r in turns) for _, turns in rounds]
    cached = [sum(r.num_cached_tokens for _, r in turns) for _, turns in rounds]
    shares = [found / total for found, total in zip(cached, prompts, strict=True)]
    report.add("prompt tokens from the cache", shares, "of 1", "higher")
    again = [
        sum(max(0, turn.num_said - request.num_cached_tokens) for turn, request in turns)
        for _, turns in rounds
    ]
    report.add("tokens said before, computed again", again, "tokens")


def _per_token(turn: Turn, request: Request) -> float:
    """Returns the seconds of each token after the first."""
    num_later = len(request.token_ids) - request.num_prompt_tokens - 1
    return (turn.last_s - turn.first_s) / max(1, num_later)


async def measure(settings: Settings, report: Report) -> None:
    """Starts, runs the workload and stops; then times copies of snapshots."""
    arguments = settings.arguments
    workload = Workload(
        arguments.sessions, arguments.turns, arguments.system, settings.model.vocab_size,
        arguments.divide_by,
    )  # fmt: skip
    rounds: list[tuple[float, list[tuple[Turn, Request]]]] = []
    async with offline_engine(settings.config) as engine:
        sessions, counts = Sessions(engine, workload), engine.core.counters.scheduler
        await sessions.warm_up()
        report.state("graphs", engine.graph_facts())
        use, steps_before = engine.graph_use(), engine.core.counters.num_steps
        busy_before = engine.core.counters.worker_busy_us
        made, used = counts.num_snapshots_made, counts.num_snapshots_used
        for run in range(arguments.repeats):
            if rounds and not settings.budget.left_s:
                report.problem(f"run {run + 1}: out of time")
                break
            rounds.append(await sessions.run(run))
            add_times(report, rounds)
        report.state("steps", engine.graph_use().since(use))
        if engine.num_verifications:
            report.add("drafts that held", [engine.acceptance], "a step", "higher")
        stats = engine.core.stats()
        num_steps = engine.core.counters.num_steps - steps_before
        step_us = (engine.core.counters.worker_busy_us - busy_before) / max(1, num_steps)
        made, used = counts.num_snapshots_made - made, counts.num_snapshots_used - used
    if stats.num_state_blocks:
        num_slots = 1 + settings.config.speculation.num_speculative_tokens
        num_blocks = stats.num_state_blocks // num_slots
        num_bytes = num_blocks * stats.worker.block_bytes
        report.state("snapshots", {
            "made": made, "used": used, "kept": stats.num_snapshots, "bytes of one": num_bytes,
            "a step": round(made / max(1, num_steps), 4),
        })  # fmt: skip
        copy_us = time_copies(num_blocks, stats.worker.block_bytes, stats.worker.device_name)
        report.add("copy of a snapshot", copy_us, "us")
        share = median(copy_us) * (made + used) / max(1.0, step_us * num_steps)
        report.add("copies, share of all steps", [share], "of 1")


def time_copies(num_blocks: int, block_bytes: int, device_name: str) -> list[float]:
    """Returns the microseconds of copying a state of as many blocks, several times.

    An engine has the layers of a group apart, which takes a few launches more.
    """
    device = torch.device("cpu" if device_name == "cpu" else "cuda")
    memory = [torch.zeros((1, 2 * COPIES * num_blocks, block_bytes), dtype=torch.uint8).to(device)]
    places = torch.arange(2 * COPIES * num_blocks, device=device).view(COPIES, 2, num_blocks)
    times = []
    for _ in range(1 + ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        for blocks in places:
            copy_blocks(memory, blocks)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started_s) / COPIES * 1e6)
    return times[1:]


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6, help="of a session")
    parser.add_argument("--system", type=int, default=3000, help="tokens that all sessions share")
    parser.add_argument("--repeats", type=int, default=2, help="runs, each of other tokens")
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    return parser


def main() -> None:
    """Measures and prints."""
    run_program("turns", own_parser(), measure, defaults=DEFAULTS)


if __name__ == "__main__":
    main()
