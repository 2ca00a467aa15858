"""Steps of one batch that decodes, with scheduler and ModelRunner in one process.

Two steps are in flight, as the engine keeps them, and every message is serialized and parsed.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch.profiler import record_function

from services.engine.batch import BatchDescriptor, StepResult
from services.engine.request import Request, SamplingParams
from tests.bench.trace_intervals import PREFIX
from tests.bench.workload import fitted, fixed_jobs
from tests.support.engine_harness import RecordingSink
from tests.support.graph_engine import GraphEngine

PROMPT_LEN = 128
STEPS_IN_FLIGHT = 2


class SteadyDecode:
    """A batch that decodes for as long as it is asked to."""

    def __init__(
        self,
        engine: GraphEngine,
        batch: int,
        num_steps: int,
        vocab_size: int,
        *,
        steps_in_flight: int = STEPS_IN_FLIGHT,
        prompt_len: int = PROMPT_LEN,
        prompts: Sequence[list[int]] = (),
    ) -> None:
        """Starts the requests, until all of them decode.

        prompts: of the requests; by default random ones of prompt_len tokens.
        """
        self._engine = engine
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque = deque()
        self.is_profiled = False
        self.times_us: dict[str, list[float]] = {}
        self.descriptor = BatchDescriptor()
        """Of the step that began last."""
        jobs = fitted(
            fixed_jobs(batch, prompt_len, num_steps + 64, seed=batch),
            vocab_size=vocab_size,
            max_model_len=1 << 20,
        )
        self._requests = [
            Request(
                request_id=f"{batch}-{index}",
                handle=index,
                prompt_token_ids=prompts[index] if prompts else job.prompt,
                sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=job.num_output),
                sink=RecordingSink(),
                arrival_s=0.0,
            )
            for index, job in enumerate(jobs)
        ]
        for request in self._requests:
            engine.scheduler.add(request)
        while not all(request.num_output_tokens for request in self._requests):
            self.step()

    def step(self) -> None:
        """Brings one step to its end, and keeps another one running."""
        engine = self._engine
        while len(self._in_flight) < self._steps_in_flight:
            with self._section("schedule"):
                step = engine.scheduler.schedule()
                assert step is not None
                self.descriptor = step.descriptor
                message = step.descriptor.SerializeToString()
            with self._section("execute"):
                pending = engine.runner.execute(BatchDescriptor.FromString(message))
            self._in_flight.append((step, pending))
        self._finish()

    def drain(self) -> None:
        """Brings all steps to their end."""
        while self._in_flight:
            self._finish()

    def _finish(self) -> None:
        step, pending = self._in_flight.popleft()
        with self._section("wait"):
            if pending.done is not None:
                pending.done.synchronize()
        with self._section("result"):
            message = pending.message().SerializeToString()
        with self._section("update"):
            self._engine.scheduler.update(step, StepResult.FromString(message))

    def end(self) -> None:
        """Gives the batch's rows and blocks back."""
        for request in self._requests:
            self._engine.scheduler.abort(request)
        for step, pending in self._in_flight:
            self._engine.scheduler.update(step, pending.message())

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        started_ns = time.perf_counter_ns()
        with record_function(PREFIX + name) if self.is_profiled else nullcontext():
            yield
        elapsed_us = (time.perf_counter_ns() - started_ns) / 1000
        self.times_us.setdefault(name, []).append(elapsed_us)
