"""Any order of submit, schedule, complete and abort keeps the scheduler's promises."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.batch import StepFailure
from services.engine.errors import InvalidRequestError, MemoryExhaustedError, QueueFullError
from services.engine.kv_cache import snapshots, states
from services.engine.kv_cache.block_events import BlockEvents, Tier
from services.engine.kv_cache.cache_groups import STATE, LayerGroup
from services.engine.kv_cache.host_tier import HostLimits
from services.engine.kv_cache.prefix_journal import BlockJournal, JointPrefixJournal
from services.engine.limits import StepLimits
from services.engine.request import FinishReason, Request, RequestStatus
from services.engine.scheduler.recovery import lose_worker
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from services.engine.scheduler.waiting_queue import service_order
from tests.support.block_replica import BlockReplica
from tests.support.fake_images import IMAGE_TOKEN, image_at, meant
from tests.support.fake_worker import VOCAB_SIZE, FakeWorker, expected_output, prompt_logprob
from tests.support.requests import make_request
from tests.support.token_masks import ManualConstraint

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
MAX_NUM_WAITING = 6
WINDOWS = [(1,), (6,), (None, 5), (None, 9, 9), (3, 8)]
STATES = [(None, STATE), (None, STATE, STATE), (STATE,), (None, 5, STATE)]
STEPS_IN_FLIGHT = 3  # one more than the engine has, for orders that it would seldom meet

# Few prompts, so that equal ones and equal prefixes meet, some of them a whole number of blocks.
prompts = st.builds(
    lambda shared, own: list(range(shared)) + own,
    st.sampled_from([1, 4, 8, 11, 12, 18]),
    st.sampled_from([[], [], [100], [101, 102], [100, 101, 102, 103], [100] * 18]),
)


images = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 3, 10, 17])), max_size=2)
"""Images: a number that each shows, and its vectors."""


def with_images(prompt, images, place):
    """Puts images next to each other into a prompt; returns its tokens and the images."""
    offset, placed = min(place, len(prompt)), []
    for shown, num_vectors in images:
        placed.append(image_at(offset, num_vectors, shown))
        offset += num_vectors
    first = placed[0].offset if placed else 0
    num_tokens = sum(each.num_tokens for each in placed)
    return prompt[:first] + [IMAGE_TOKEN] * num_tokens + prompt[first:], placed


def allowed_by_rule(output: list[int]) -> list[int]:
    """Tokens that the constraint of some requests allows; end tokens among them."""
    return list(range(len(output) % 3, 1000, 3))


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and a fake worker that may be some steps late."""

    @initialize(
        num_blocks=st.integers(3, 11),
        max_num_seqs=st.sampled_from([1, 3, 5, 5]),
        max_num_batched_tokens=st.sampled_from([1, 3, 7, 20, 20]),
        enable_prefix_caching=st.booleans(),
        windows=st.sampled_from([(None,)] * 4 + WINDOWS + STATES),
        state_pages=st.sampled_from([1, 3]),
        num_speculative_tokens=st.sampled_from([0, 0, 1, 2, 5]),
        lookup_sizes=st.sampled_from([None, None, (1, 2)]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        num_encoder_pages=st.integers(2, 4),
        max_encoder_tokens=st.sampled_from([1, 5, 40]),
        num_host_slots=st.sampled_from([0, 1, 4, 60, 60]),
        max_step_loads=st.sampled_from([1, 3, 30]),
        has_disk=st.booleans(),
    )
    def start(
        self, num_blocks, windows, state_pages, enable_prefix_caching, num_host_slots,
        max_step_loads, has_disk, **fields,
    ):  # fmt: skip
        self.disks = ({}, {}) if has_disk else (None, None)
        num_states = windows.count(STATE)
        if fields["num_speculative_tokens"]:
            fields["num_stages"] = 1
        # A window needs blocks for itself and a whole step's tokens; a state is there once more.
        num_slots = 2 + fields["num_speculative_tokens"]
        num_of_states = num_slots * num_states * state_pages
        self.num_blocks = 1 + (num_blocks - 1) * len(windows) + num_of_states
        self.enable_prefix_caching = enable_prefix_caching
        num_pages = num_states * state_pages
        self.host = HostLimits(
            num_slots=num_host_slots, max_step_loads=max(num_pages, max_step_loads)
        )
        self.limits = StepLimits(
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            layer_groups=tuple(LayerGroup(layers=(), window=window) for window in windows),
            state_pages=state_pages if num_states else 0,
            **fields,
        )
        self.now_s = 0.0
        self.capacity = self.limits.num_cache_tokens(self.num_blocks)
        self.live: list[Request] = []
        self.salted: list[Request] = []
        self.events, self.subscriber = BlockEvents(), BlockReplica()
        self.start_worker()

    def start_worker(self):
        self.scheduler = Scheduler(
            self.limits,
            num_blocks=self.num_blocks,
            max_num_waiting=MAX_NUM_WAITING,
            enable_prefix_caching=self.enable_prefix_caching,
            clock=lambda: self.now_s,
            journal=BlockJournal(
                JointPrefixJournal() if self.host.num_slots else None, self.events
            ),
            host=replace(
                self.host, disk_entries=None if self.disks[0] is None else list(self.disks[0])
            ),
        )
        # The second one runs steps as they are recorded.
        self.worker, self.replay = (
            FakeWorker(
                max_num_seqs=self.limits.max_num_seqs,
                max_model_len=MAX_MODEL_LEN,
                num_blocks=self.num_blocks,
                block_size=BLOCK_SIZE,
                windows=self.limits.windows,
                state_blocks=self.limits.state_blocks,
                num_cache_tokens=self.capacity,
                makes_drafts=self.limits.lookup_sizes is None,
                has_stages=self.limits.num_stages > 1,
                host=self.host,
                disk=disk,
            )
            for disk in self.disks
        )
        self.in_flight: deque[ScheduledStep] = deque()

    @rule(
        prompt=prompts,
        images=st.one_of(st.just([]), images),
        image_place=st.sampled_from([0, 3, 4, 20]),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from(["", "", "tenant"]),
        max_tokens=st.sampled_from([1, 6, 14, 14]),
        min_tokens=st.integers(0, 2),
        end_every=st.sampled_from([5, 1000, 1000]),
        temperature=st.sampled_from([0.0, 1.0]),
        logprobs=st.sampled_from([None, None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        seed=st.integers(0, 3),
        is_constrained=st.sampled_from([False, False, True]),
    )
    def submit(
        self, prompt, images, image_place, priority, cache_salt, max_tokens, min_tokens, end_every,
        is_constrained,
        **fields,
    ):  # fmt: skip
        prompt, placed = with_images(prompt, images, image_place)
        request = make_request(
            prompt,
            images=placed,
            priority=priority,
            cache_salt=cache_salt,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            end_token_ids=range(0, 1000, end_every),
            **fields,
        )
        if is_constrained:
            request.constraint = ManualConstraint(
                allowed_by_rule, vocab_size=VOCAB_SIZE, is_instant=False
            )
        if len(prompt) >= MAX_MODEL_LEN or len(prompt) > self.capacity:
            with pytest.raises(InvalidRequestError):
                self.scheduler.add(request)
        elif self.scheduler.num_waiting >= MAX_NUM_WAITING:
            with pytest.raises(QueueFullError):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.live.append(request)
            self.salted += [request] * bool(cache_salt)

    @precondition(lambda self: len(self.in_flight) < STEPS_IN_FLIGHT)
    @rule()
    def schedule(self):
        before = sorted(self.running(), key=service_order)
        is_trial = any(request.is_suspect for request in self.live)
        step = self.scheduler.schedule()
        if step is not None:
            self.assert_suspects_are_alone(step)
        preempted = [r for r in before if r.status is RequestStatus.WAITING]
        # The preempted requests are the last ones in service order, and never all.
        assert before[len(before) - len(preempted) :] == preempted
        assert is_trial or len(preempted) < max(len(before), 1)
        if preempted and not is_trial:
            assert set(self.running()) < set(before), "admitted beside a preemption"
        if step is None:
            is_waiting = any(request.awaits_mask for request in self.live)
            is_waiting |= self.scheduler.tiers[0].wake_s is not None
            assert self.in_flight or is_waiting or not self.live, "nothing runs and nothing will"
            return
        context = step.descriptor.context
        assert context.num_tokens <= self.limits.max_num_batched_tokens
        assert context.batch_size <= self.limits.max_num_seqs
        self.in_flight.append(step)

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self):
        self.now_s += 0.01
        step = self.in_flight.popleft()
        result = self.worker.execute(step.descriptor)
        if result.failure:
            self.replay.memory_tokens = self.worker.memory_tokens
            assert self.replay.execute(step.descriptor) == result
            if result.failure != StepFailure.STEP_FAILURE_SKIPPED:
                self.retreat(step)
            return
        self.replay.memory_tokens = 2**31
        outputs = self.scheduler.update(step, result)
        assert not step.descriptor.spec_decode_metadata.carried_requests
        assert self.replay.execute(step.descriptor) == result
        for output in outputs:
            request = output.request
            assert request in self.live
            has_logprobs = request.sampling.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) * has_logprobs
            request.sink.put(output)
            if output.is_last:
                self.live.remove(request)
                self.check_output(request, output.finish_reason)

    @precondition(lambda self: self.disks[0] is not None)
    @rule()
    def read_and_write_disk(self):
        news, same = self.worker.take_disk_news(), self.replay.take_disk_news()
        assert news == same
        self.scheduler.tiers[0].take_disk_news(news)

    @precondition(lambda self: self.disks[0])
    @rule(data=st.data())
    def lose_file(self, data):
        entry = data.draw(st.sampled_from(sorted(self.disks[0])))
        for disk in self.disks:
            del disk[entry]

    @precondition(lambda self: any(r.awaits_mask for r in self.live))
    @rule(data=st.data())
    def learn_mask(self, data):
        unknown = [r for r in self.live if r.constraint is not None and r.constraint.mask is None]
        if unknown:
            data.draw(st.sampled_from(unknown)).constraint.work_out()

    @precondition(lambda self: self.in_flight)
    @rule(memory_tokens=st.integers(0, 8))
    def run_out_of_memory(self, memory_tokens):
        """The oldest step fails if it is too large; later ones have memory enough again."""
        self.worker.memory_tokens = memory_tokens
        self.complete()
        self.worker.memory_tokens = 2**31

    def retreat(self, step):
        num_tokens = step.descriptor.context.num_tokens
        outputs = self.scheduler.retreat([step, *self.in_flight])
        assert len(outputs) <= (num_tokens == 1)
        for output in outputs:
            assert isinstance(output.error, MemoryExhaustedError)
            self.live.remove(output.request)
        assert not self.running()
        assert self.scheduler.num_batched_tokens_limit <= max(1, num_tokens // 2)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.live))
        assert self.scheduler.abort(request)
        assert not self.scheduler.abort(request)
        self.live.remove(request)
        assert not request.block_ids
        assert not request.state_block_ids
        assert request.row is None

    @rule()
    def lose_worker(self):
        """Another one goes on with what is live; who was in a step that was lost is suspect."""
        lost = {r for step in self.in_flight for r in (*step.requests, *step.unsampled)}
        for request in lost:
            lose_worker(request, was_killed=False)
        self.events.clear()
        self.start_worker()
        for request in self.live:
            self.scheduler.resume(request)

    @rule()
    def read_events(self):
        """A subscriber, and one that comes now, know the blocks of all requests without a salt."""
        late = BlockReplica()
        for each in (self.subscriber, late):
            each.read(self.events)
        assert late.blocks == self.subscriber.blocks
        hidden = {key for request in self.salted for key in request.block_keys}
        found = set(self.scheduler.prefix_changes(None, max_keys=10**6).added) - hidden
        known = set.union(*map(late.keys, Tier))
        # The content of what only a disk had is not known.
        assert known == found if self.disks[0] is None else known <= found
        late.check_contents(BLOCK_SIZE)

    def assert_suspects_are_alone(self, step):
        sent = [{*each.requests, *each.unsampled} for each in (*self.in_flight, step)]
        if any(request.is_suspect for request in sent[-1]):
            assert len(set.union(*sent)) == 1

    @invariant()
    def counts_agree(self):
        assert self.scheduler.num_running == len(self.running())
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work == bool(self.live)
        rows = [request.row for request in self.running()]
        assert None not in rows
        assert len(set(rows)) == len(rows)
        for request in self.live:
            known_or_pending = len(request.token_ids) + request.num_pending_tokens
            assert known_or_pending <= request.max_num_tokens
            assert request.num_pending_tokens or not request.num_pending_drafts
            # Drafts are computed before it is known whether they hold, and void if not.
            most = known_or_pending + request.num_pending_drafts
            assert request.num_computed_tokens <= most
            num_blocks = -(-request.num_computed_tokens // BLOCK_SIZE)
            assert len(request.block_ids) >= num_blocks * len(self.limits.windows)

    @invariant()
    def no_block_is_lost_and_only_equal_prefixes_are_shared(self):
        content: dict[int, object] = {}
        for request in self.live:
            if request.status is RequestStatus.WAITING:
                assert not request.block_ids
                assert not request.state_block_ids
            else:
                assert len(request.state_block_ids) == self.limits.num_state_blocks
            for entry, block_id in enumerate(request.state_block_ids):
                assert content.setdefault(block_id, (request, "state", entry)) == (
                    request,
                    "state",
                    entry,
                )
            for snapshot in request.snapshots:
                content |= dict.fromkeys(snapshot.block_ids, (request, snapshot.num_tokens))
            num_groups = len(self.limits.windows)
            assert len(request.block_ids) == 0 or len(request.block_ids) % num_groups == 0
            for entry, block_id in enumerate(request.block_ids):
                i, group = divmod(entry, num_groups)
                if not block_id:
                    least = len(request.token_ids) + max(0, request.num_pending_tokens - 1)
                    start = min(request.num_computed_tokens, least)
                    distance = start - (i + 1) * BLOCK_SIZE
                    assert distance >= self.limits.windows[group] - 1, "given back too early"
                    continue
                prefix = meant(request.token_ids, request.images)[: (i + 1) * BLOCK_SIZE]
                is_full = len(prefix) == (i + 1) * BLOCK_SIZE
                # Blocks that no other request may hold get a content of their own.
                mine = (request.cache_salt, group, tuple(prefix)) if is_full else (request, entry)
                assert content.setdefault(block_id, mine) == mine
            for group, window in enumerate(self.limits.windows):
                held = sum(map(bool, request.block_ids[group::num_groups]))
                tokens = self.limits.cache_groups.max_query_tokens + (window or MAX_MODEL_LEN)
                assert held <= tokens // BLOCK_SIZE + 2
        num_free_blocks = self.scheduler.num_free_blocks
        assert 0 not in content
        assert num_free_blocks == self.num_blocks - 1 - len(content)
        assert 0 <= self.scheduler.num_cached_blocks <= num_free_blocks

    def teardown(self):
        """All requests end in a bounded number of steps, and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        # The first in service order computes a token in every step and keeps its blocks.
        for _ in range(2 * (MAX_MODEL_LEN + STEPS_IN_FLIGHT) * (len(self.live) + 1)):
            if len(self.in_flight) < STEPS_IN_FLIGHT:
                self.schedule()
            if self.in_flight:
                self.complete()
            for request in self.live:
                if request.constraint is not None and request.constraint.mask is None:
                    request.constraint.work_out()
            if self.disks[0] is not None:
                self.read_and_write_disk()
            self.counts_agree()
        while self.in_flight:
            self.complete()
        while (step := self.scheduler.schedule()) is not None:
            assert not step.has_requests
            self.in_flight.append(step)
            self.complete()
        assert not self.live
        self.read_events()
        assert self.scheduler.num_free_blocks == self.num_blocks - 1
        assert self.scheduler.schedule() is None

    def running(self) -> list[Request]:
        return [r for r in self.live if r.status is RequestStatus.RUNNING]

    def check_output(self, request: Request, reason: FinishReason | None) -> None:
        bound = min(MAX_MODEL_LEN, self.capacity + 1) - request.num_prompt_tokens
        expected = expected_output(
            meant(request.prompt_token_ids, request.images),
            request.sampling,
            max_output=bound,
            allowed=None if request.constraint is None else allowed_by_rule,
        )
        assert request.sink.token_ids == expected
        told = [entry for output in request.sink.outputs for entry in output.prompt_logprobs]
        if request.sampling.prompt_logprobs is None:
            assert not told
        else:
            prompt = request.prompt_token_ids
            assert [entry.logprob for entry in told] == [prompt_logprob(t) for t in prompt[1:]]
        ended_by_token = expected[-1] in request.sampling.end_token_ids and (
            len(expected) > request.sampling.min_tokens
        )
        assert reason is (FinishReason.STOP if ended_by_token else FinishReason.LENGTH)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    """Snapshots every few tokens, so that short sequences have some."""
    monkeypatch.setattr(snapshots, "CHUNK", 2 * BLOCK_SIZE)
    monkeypatch.setattr(states, "LONG_PROMPT", 3 * BLOCK_SIZE)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=60)
