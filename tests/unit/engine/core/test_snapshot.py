"""A snapshot and the steps after it lead to what the worker did, whenever it is taken."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.engine.v1.recording_pb2 import EngineSettings
from services.engine.core.snapshot import PendingSnapshot
from services.engine.kv_cache.cache_groups import LayerGroup
from services.engine.limits import StepLimits
from services.engine.replay.cache_content import BlockNumbers, CacheContent
from services.engine.replay.opening import read_opening
from services.engine.replay.recording import ReplayError
from services.engine.scheduler.scheduler import Scheduler
from services.engine.worker.inputs.batch import Batch
from tests.support.fake_worker import VOCAB_SIZE, FakeWorker
from tests.support.requests import make_request

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
MAX_NUM_SEQS = 4
STEPS_IN_FLIGHT = 2

LIMITS = StepLimits(
    max_num_seqs=MAX_NUM_SEQS,
    max_num_batched_tokens=12,
    max_model_len=MAX_MODEL_LEN,
    block_size=BLOCK_SIZE,
    vocab_size=VOCAB_SIZE,
)
# Few prompts, so that equal prefixes meet; few blocks, so that requests are preempted.
prompts = st.builds(
    lambda shared, own: list(range(shared)) + own,
    st.sampled_from([1, 4, 8, 12, 18]),
    st.sampled_from([[], [100], [101, 102], [100] * 8]),
)
actions = st.one_of(
    st.tuples(st.just("submit"), prompts),
    st.tuples(st.sampled_from(["schedule", "schedule", "complete", "complete"]), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 7)),
)


class Engine:
    """A scheduler and a fake worker, and the steps that were completed."""

    def __init__(self, num_blocks, windows=(None,), num_speculative_tokens=0):
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            limits_of(windows, num_speculative_tokens), num_blocks=num_blocks
        )
        self.worker = make_worker(num_blocks, windows)
        self.in_flight = deque()
        self.completed = []
        self.requests = []
        self.snapshot = None

    def act(self, action, value):
        if action == "submit":
            request = make_request(value, max_tokens=10, end_token_ids=range(0, VOCAB_SIZE, 9))
            self.scheduler.add(request)
            self.requests.append(request)
        elif action == "schedule" and len(self.in_flight) < STEPS_IN_FLIGHT:
            step = self.scheduler.schedule()
            if step is not None:
                self.in_flight.append(step)
        elif action == "complete" and self.in_flight:
            self.complete()
        elif action == "abort" and self.requests:
            self.scheduler.abort(self.requests[value % len(self.requests)])

    def complete(self):
        step = self.in_flight.popleft()
        result = self.worker.execute(step.descriptor)
        self.scheduler.update(step, result)
        self.completed.append((step.descriptor, result))
        if self.snapshot is not None and not self.snapshot.is_settled:
            self.snapshot.take(step, result)

    def take_snapshot(self):
        self.snapshot = PendingSnapshot(
            self.scheduler.running,
            next_step_id=self.scheduler.next_step_id,
            num_in_flight=len(self.in_flight),
        )

    def finish(self):
        while self.scheduler.has_work or self.in_flight:
            self.act("schedule", None)
            self.act("complete", None)


def limits_of(windows, num_speculative_tokens):
    groups = tuple(LayerGroup(layers=(i,), window=window) for i, window in enumerate(windows))
    return replace(LIMITS, layer_groups=groups, num_speculative_tokens=num_speculative_tokens)


def make_worker(num_blocks, windows):
    return FakeWorker(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        windows=windows,
    )


def replay(snapshot, steps, num_blocks, windows, num_speculative_tokens):
    """Runs the steps on a worker with nothing in its cache; yields their results."""
    limits = limits_of(windows, num_speculative_tokens)
    blocks = BlockNumbers(num_blocks, table_width=limits.block_table_width)
    for row in snapshot.rows:
        blocks.use(row.block_ids)
    for descriptor, _ in steps:
        blocks.use(descriptor.attn_metadata.block_table_updates.block_ids)
    opening = read_opening(snapshot, blocks, limits=limits)
    content = CacheContent(limits, num_blocks=blocks.num_blocks)
    worker = make_worker(blocks.num_blocks, windows)
    worker.restore(opening.descriptor, opening.num_computed, next_step_id=snapshot.next_step_id)
    for row, tokens in content.restore(opening.descriptor, opening.num_computed).items():
        if tokens:
            worker.compute(row, tokens)
    for recorded, _ in steps:
        descriptor = type(recorded)()
        descriptor.CopyFrom(recorded)
        blocks.renumber(descriptor.attn_metadata.block_table_updates)
        slots = content.step(Batch.read(descriptor, limits, num_blocks=blocks.num_blocks))
        worker.update_tables(descriptor)
        for row, tokens in slots.missing.items():
            worker.compute(row, tokens)
        yield worker.execute(descriptor)


@given(
    before=st.lists(actions, min_size=10, max_size=60),
    after=st.lists(actions, max_size=40),
    num_blocks=st.integers(8, 14),
    kind=st.sampled_from([((None,), 0), ((None,), 2), ((5,), 0), ((None, 7), 0)]),
)
@settings(max_examples=80)
def test_a_replay_from_a_snapshot_gives_the_results_of_the_worker(before, after, num_blocks, kind):
    windows, num_speculative_tokens = kind
    num_blocks *= len(windows)
    engine = Engine(num_blocks, windows, num_speculative_tokens)
    for action in before:
        engine.act(*action)
    engine.take_snapshot()
    for action in after:
        engine.act(*action)
    engine.finish()
    snapshot = engine.snapshot.message()
    snapshot.engine.CopyFrom(EngineSettings(block_size=BLOCK_SIZE, num_blocks=num_blocks))
    steps = engine.completed[snapshot.next_step_id - 1 :]
    results = list(replay(snapshot, steps, num_blocks, windows, num_speculative_tokens))
    assert results == [result for _, result in steps]


def test_tokens_of_steps_in_flight_come_in_with_their_results():
    engine = Engine(num_blocks=12)
    engine.act("submit", [1, 2, 3])
    engine.act("schedule", None)
    engine.act("schedule", None)
    engine.take_snapshot()
    assert not engine.snapshot.is_settled
    engine.complete()
    engine.complete()
    assert engine.snapshot.is_settled
    (row,) = engine.snapshot.message().rows
    sampled = b"".join(result.token_ids for _, result in engine.completed)
    assert row.assignment.token_ids.endswith(sampled)
    assert (len(row.assignment.token_ids) // 4, row.num_computed_tokens) == (5, 4)
    assert row.assignment.num_prompt_tokens == 3


@pytest.mark.parametrize("num_computed", [6, 9])
def test_a_snapshot_with_more_computed_tokens_than_tokens_or_blocks_is_refused(num_computed):
    engine = Engine(num_blocks=12)
    engine.act("submit", [1, 2, 3])
    engine.act("schedule", None)
    engine.take_snapshot()
    engine.complete()
    snapshot = engine.snapshot.message()
    snapshot.engine.block_size = BLOCK_SIZE
    snapshot.rows[0].num_computed_tokens = num_computed
    blocks = BlockNumbers(12)
    blocks.use(snapshot.rows[0].block_ids)
    with pytest.raises(ReplayError, match="of the snapshot has"):
        read_opening(snapshot, blocks, limits=LIMITS)
