"""The figures of an engine: decode, prefill, serving and start, taken from an OfflineEngine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter

from tests.bench.floor import StepFloor
from tests.bench.machine import gpus_used_mib, peak_host_mib
from tests.bench.offline_engine import Generated, OfflineEngine
from tests.bench.report import Report
from tests.bench.serving_floor import serving_floor
from tests.bench.settings import Budget
from tests.bench.workload import Job, fitted, fixed_jobs, serving_jobs

DECODE_PROMPT = 128
DECODE_OUTPUT = 256
WARM_UP_OUTPUT = 8


@dataclass
class Bench:
    """One engine under measurement, and where its figures go.

    floor: the least time of the model's steps, on a machine for which it is known.
    divide_by: makes prompts and outputs shorter, for trial runs on a slow machine.
    """

    engine: OfflineEngine
    report: Report
    budget: Budget
    vocab_size: int
    max_model_len: int
    floor: StepFloor | None = None
    divide_by: int = 1
    _seed: int = 0

    def jobs(self, count: int, prompt_len: int, num_output: int) -> list[Job]:
        """Returns requests that no earlier request was like."""
        self._seed += 1
        return self._fitted(fixed_jobs(count, prompt_len, num_output, seed=self._seed))

    async def start(self) -> dict[str, float]:
        """Finishes an engine's start; returns its seconds, and the time of each stage.

        `first_token` has the first request, sent as soon as the engine was ready; `captured` is
        when all planned graphs were there, which may be later.
        """
        times = self.engine.times
        first = await self.engine.generate(self.jobs(1, DECODE_PROMPT, 1))
        await self.engine.wait_until_captured()
        parts = times.parts() | {
            "first_token": times.ready_s - times.started_s + first.elapsed_s,
            "captured": perf_counter() - times.started_s,
            "all_captures": sum(each.capture_s for each in self.engine.graph_figures()),
        }
        return {name: round(value, 3) for name, value in parts.items()}

    async def decode(
        self,
        batch: int,
        repeats: int,
        num_output: int = DECODE_OUTPUT,
        prompt_len: int = DECODE_PROMPT,
    ) -> list[float]:
        """Returns milliseconds per decode step of a whole batch, one for each repeat.

        The time of all tokens less that of one, over the steps between: prompts cancel out.
        """
        await self.engine.generate(self.jobs(batch, prompt_len, WARM_UP_OUTPUT))
        values: list[float] = []
        while self._goes_on(values, repeats):
            one = await self.engine.generate(self.jobs(batch, prompt_len, 1))
            jobs = self.jobs(batch, prompt_len, num_output)
            before = self.engine.num_verifications
            many = await self.engine.generate(jobs)
            # With speculation a step brings a request one token or more.
            num_verifications = self.engine.num_verifications - before
            num_steps = num_verifications / batch or max(1, jobs[0].num_output - 1)
            values.append((many.elapsed_s - one.elapsed_s) / num_steps * 1000)
        return values

    async def prefill(self, prompt_len: int, repeats: int) -> list[float]:
        """Returns milliseconds from a prompt to its first token, one for each repeat."""
        await self.engine.generate(self.jobs(1, prompt_len, 1))
        values: list[float] = []
        while self._goes_on(values, repeats):
            generated = await self.engine.generate(self.jobs(1, prompt_len, 1))
            values.append(generated.elapsed_s * 1000)
        return values

    def serving(self, count: int) -> list[Job]:
        """Returns the requests of the serving workload."""
        return self._fitted(serving_jobs(count))

    async def add_decode(
        self, batches: Sequence[int], repeats: int, contexts: Sequence[int] = (DECODE_PROMPT,)
    ) -> None:
        """Measures and reports decode steps after prompts of each length in `contexts`."""
        for prompt_len, batch in product(contexts, batches):
            name = f"decode, batch {batch}"
            if prompt_len != DECODE_PROMPT:
                name += f" after {prompt_len} tokens"
            if batch > self.engine.config.scheduler.max_num_seqs:
                self.report.problem(
                    f"{name}: max_num_seqs is {self.engine.config.scheduler.max_num_seqs}"
                )
            elif prompt_len >= self.max_model_len:
                self.report.problem(f"{name}: max_model_len is {self.max_model_len}")
            elif self._has_time(name):
                middle = prompt_len + DECODE_OUTPUT // 2
                floor = self.floor and self.floor.decode_ms(batch, middle)
                values = await self.decode(batch, repeats, prompt_len=prompt_len)
                self.report.add(name, values, "ms/step", floor=floor)
        if self.engine.num_verifications:
            self.report.state("accepted drafts of a request in a step", self.engine.acceptance)

    async def add_prefill(self, prompt_lens: Sequence[int], repeats: int) -> None:
        """Measures and reports prompts."""
        for prompt_len in prompt_lens:
            name = f"prefill, {prompt_len} tokens"
            if prompt_len >= self.max_model_len:
                self.report.problem(f"{name}: max_model_len is {self.max_model_len}")
            elif self._has_time(name):
                floor = self.floor and self.floor.prefill_ms(prompt_len)
                values = await self.prefill(prompt_len, repeats)
                self.report.add(name, values, "ms", floor=floor)

    async def add_serving(self, count: int, repeats: int) -> Generated | None:
        """Measures and reports the serving workload; returns what the last run generated."""
        jobs = self.serving(count)
        before = self.engine.graph_use()
        runs: list[Generated] = []
        while self._has_time("serving") and len(runs) < repeats:
            runs.append(await self.engine.generate(jobs))
            self.report.note(f"serving: {runs[-1].elapsed_s:.2f} s")
        if not runs:
            return None
        elapsed_s = [run.elapsed_s for run in runs]
        floor = self.floor and serving_floor(self.floor, jobs)
        add_serving_figures(
            self.report, "serving", jobs, elapsed_s, floor_s=floor and floor.overlapped
        )
        if floor is not None:
            seconds = {name: round(value, 3) for name, value in floor.figures().items()}
            self.report.state("serving floor", seconds)
        ttft_ms = [median(run.ttft_s) * 1000 for run in runs]
        self.report.add("serving, first token p50", ttft_ms, "ms")
        self.report.state("serving", self.engine.graph_use().since(before))
        return runs[-1]

    async def add_limited_serving(self, count: int, limits: Sequence[int]) -> None:
        """Measures the serving workload once with at most as many requests at a time."""
        for at_once in limits:
            name = f"serving, {at_once} at once"
            if self._has_time(name):
                before = self.engine.graph_use()
                run = await self.engine.generate(self.serving(count), at_once=at_once)
                self.report.add(name, [run.elapsed_s], "s")
                self.report.state(name, self.engine.graph_use().since(before))

    def state_memory(self) -> None:
        """Reports the worker's memory, now and at most."""
        worker = self.engine.worker
        self.report.state(
            "memory",
            {
                "gpus_used_mib": gpus_used_mib(),
                "worker_peak_host_mib": peak_host_mib(self.engine.worker_pid),
                "kv_blocks": worker.num_blocks,
                "kv_tokens": worker.num_blocks * self.engine.config.cache.block_size,
                "kv_mib": worker.num_blocks * worker.block_bytes // 2**20,
            },
        )

    def _fitted(self, jobs: list[Job]) -> list[Job]:
        return fitted(
            jobs,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            divide_by=self.divide_by,
        )

    def _has_time(self, name: str) -> bool:
        if self.budget.left_s > 0:
            return True
        self.report.problem(f"{name}: out of time")
        return False

    def _goes_on(self, values: list[float], repeats: int) -> bool:
        """Whether to repeat once more: one value at least, then while there is time."""
        return not values or (len(values) < repeats and self.budget.left_s > 0)


def add_serving_figures(
    report: Report,
    name: str,
    jobs: Sequence[Job],
    elapsed_s: Sequence[float],
    *,
    floor_s: float | None = None,
) -> None:
    """Reports how long a serving workload took, and its rate."""
    num_tokens = sum(job.num_output for job in jobs)
    report.add(name, elapsed_s, "s", floor=floor_s)
    rates = [num_tokens / each for each in elapsed_s]
    report.add(f"{name}, output", rates, "tokens/s", better="higher")
