"""A scheduler in front of a fake worker, whose steps a test runs one by one."""

from collections import deque
from dataclasses import replace
from itertools import pairwise

from services.engine.batch import read_int32
from services.engine.limits import StepLimits
from services.engine.request import Request, RequestOutput
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from tests.support.fake_worker import VOCAB_SIZE, FakeWorker, expected_output
from tests.support.requests import make_sampling

BLOCK_SIZE = 4


class Rig:
    """A scheduler with a fake worker, and a clock that tests set."""

    def __init__(
        self,
        *,
        num_blocks=33,
        max_num_waiting=8,
        enable_prefix_caching=True,
        host=None,
        disk=None,
        **limits,
    ):
        self.now_s = 100.0
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | limits
        self.limits = StepLimits(**sizes, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.scheduler = Scheduler(
            self.limits,
            num_blocks=num_blocks,
            max_num_waiting=max_num_waiting,
            enable_prefix_caching=enable_prefix_caching,
            clock=lambda: self.now_s,
            host=host and replace(host, disk_entries=None if disk is None else list(disk)),
        )
        self.worker = FakeWorker(
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            windows=self.limits.windows,
            state_blocks=self.limits.state_blocks,
            num_cache_tokens=self.limits.num_cache_tokens(num_blocks),
            pools=self.limits.pooling is not None,
            host=host,
            disk=disk,
        )
        self.in_flight: deque[ScheduledStep] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def send(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None, "nothing could be scheduled"
        self.in_flight.append(step)
        return step

    def receive(self) -> list[RequestOutput]:
        step = self.in_flight.popleft()
        outputs = list(self.scheduler.update(step, self.worker.execute(step.descriptor)))
        for output in outputs:
            output.request.sink.put(output)
        return outputs

    def step(self) -> list[RequestOutput]:
        self.send()
        return self.receive()

    def run(self, *, depth: int = 2) -> None:
        """Runs until no request is left, with `depth` steps in flight."""
        while self.scheduler.has_work or self.in_flight:
            step = self.scheduler.schedule() if len(self.in_flight) < depth else None
            if step is not None:
                self.in_flight.append(step)
            elif self.in_flight:
                self.receive()
            else:
                self.scheduler.tiers[0].take_disk_news(self.worker.take_disk_news())


def q_lens(step: ScheduledStep) -> list[int]:
    """Query tokens of each request of a step."""
    bounds = read_int32(step.descriptor.attn_metadata.query_start_loc).tolist()
    return [end - start for start, end in pairwise(bounds)]


def num_drafts(step: ScheduledStep) -> list[int]:
    """Drafts of each request of a step."""
    return read_int32(step.descriptor.spec_decode_metadata.num_draft_tokens).tolist()


def end_token_after(prompt: list[int], num_output: int) -> int:
    """The token that comes at this place of the output, to make it an end token."""
    return expected_output(prompt, make_sampling(max_tokens=num_output))[-1]
