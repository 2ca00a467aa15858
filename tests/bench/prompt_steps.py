"""Steps of one prompt each, with scheduler and ModelRunner in one process."""

from contextlib import nullcontext

from torch.profiler import record_function

from services.engine.batch import BatchDescriptor, StepResult
from services.engine.request import Request, SamplingParams
from tests.bench.trace_intervals import LAUNCHING, PREFIX
from tests.bench.workload import fitted, fixed_jobs
from tests.support.engine_harness import RecordingSink
from tests.support.graph_engine import GraphEngine


class PromptSteps:
    """Steps that compute one prompt each, one after the other, beside what else runs."""

    def __init__(self, engine: GraphEngine, num_tokens: int, vocab_size: int) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._count = 0
        self.is_profiled = False
        self.descriptor = BatchDescriptor()

    def step(self) -> None:
        """Submits a prompt and brings its only step to its end."""
        engine = self._engine
        engine.scheduler.add(self._request())
        step = engine.scheduler.schedule()
        assert step is not None
        message = step.descriptor.SerializeToString()
        self.descriptor = step.descriptor
        with record_function(PREFIX + LAUNCHING) if self.is_profiled else nullcontext():
            pending = engine.runner.execute(BatchDescriptor.FromString(message))
        result = pending.message().SerializeToString()
        engine.scheduler.update(step, StepResult.FromString(result))

    def _request(self) -> Request:
        self._count += 1
        # Another prompt each time, as the last one's blocks are cached.
        jobs = fixed_jobs(1, self._num_tokens, 1, seed=7777 + 13 * self._count)
        [job] = fitted(jobs, vocab_size=self._vocab_size, max_model_len=1 << 20)
        return Request(
            request_id=f"prompt-{self._num_tokens}-{self._count}",
            handle=100_000 + self._count,
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
            sink=RecordingSink(),
            arrival_s=0.0,
        )
