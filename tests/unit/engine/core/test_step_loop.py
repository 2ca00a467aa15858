"""The order in which the step loop schedules, sends, receives and publishes."""

import asyncio

from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.capture_sizes.history import StepHistory
from services.engine.core.graph_ledger import GraphLedger
from services.engine.core.stats import Counters
from services.engine.core.step_loop import StepLoop
from services.engine.core.watchers import StepWatchers
from services.engine.limits import StepLimits
from services.engine.scheduler.scheduler import Scheduler
from tests.support.engine_harness import RecordingSink, engine_config, make_request
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_worker import VOCAB_SIZE


class LoggingChannel:
    """A fake executor that writes down what happens, and gives a result only when allowed."""

    def __init__(self, executor):
        self.events = []
        self.allowed = asyncio.Semaphore(0)
        self._executor = executor

    def send(self, descriptor):
        self.events.append(f"send {descriptor.step_id}")
        self._executor.send(descriptor)

    async def receive(self):
        await self.allowed.acquire()
        result = await self._executor.receive()
        self.events.append(f"result {result.step_id}")
        return result


async def make_loop(num_speculative_tokens=0, lookup_sizes=None):
    config = engine_config()
    executor = FakeExecutor(config)
    await executor.start()
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        block_size=16,
        vocab_size=VOCAB_SIZE,
        num_speculative_tokens=num_speculative_tokens,
        lookup_sizes=lookup_sizes,
    )
    channel = LoggingChannel(executor)
    loop = StepLoop(
        scheduler=Scheduler(limits, num_blocks=64),
        channel=channel,
        step_timeout_s=30,
        publish=lambda outputs: channel.events.append(f"publish {len(outputs)}"),
        counters=Counters(),
        graphs=GraphLedger(WorkerReady()),
        history=StepHistory(max_num_seqs=8, max_num_batched_tokens=64),
        watchers=StepWatchers(),
    )
    return loop, channel, asyncio.create_task(loop.run())


async def settle():
    """Lets everything run that can run without a result."""
    for _ in range(20):
        await asyncio.sleep(0)


async def stop(task):
    task.cancel()
    await asyncio.wait({task})


async def test_the_next_step_is_sent_before_the_result_of_the_last_one_is_back():
    loop, channel, task = await make_loop()
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=4))
    loop.wake()
    await settle()
    assert channel.events == ["send 1", "send 2"]
    channel.allowed.release()
    await settle()
    assert channel.events[2:] == ["result 1", "send 3", "publish 1"]
    await stop(task)


async def test_with_drafts_of_the_worker_the_next_step_does_not_wait_either():
    loop, channel, task = await make_loop(num_speculative_tokens=2)
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=40))
    loop.wake()
    await settle()
    assert channel.events == ["send 1", "send 2"]
    channel.allowed.release()
    await settle()
    assert channel.events[2:] == ["result 1", "send 3", "publish 1"]
    await stop(task)


async def test_with_looked_up_drafts_the_next_step_waits_for_the_result():
    loop, channel, task = await make_loop(num_speculative_tokens=2, lookup_sizes=(1, 2))
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=40))
    loop.wake()
    await settle()
    assert channel.events == ["send 1"]
    channel.allowed.release()
    await settle()
    assert channel.events[1:] == ["result 1", "send 2", "publish 1"]
    await stop(task)


async def test_drafts_are_counted():
    loop, channel, task = await make_loop(num_speculative_tokens=2)
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=40))
    loop.wake()
    for _ in range(40):
        channel.allowed.release()
        await settle()
    counters = loop._counters
    assert counters.num_steps == counters.drafts.num_verifications + 1
    assert counters.drafts.num_verified == 2 * counters.drafts.num_verifications
    # The last step may bring more than was asked for, and another one is on its way.
    assert 40 <= counters.num_steps + counters.drafts.num_accepted <= 42 + 3
    await stop(task)


async def test_a_request_that_comes_while_one_step_is_out_starts_at_once():
    loop, channel, task = await make_loop()
    loop.scheduler.add(make_request(RecordingSink(), request_id="a", max_tokens=1))
    loop.wake()
    await settle()
    assert channel.events == ["send 1"]
    loop.scheduler.add(make_request(RecordingSink(), request_id="b", max_tokens=1))
    loop.wake()
    await settle()
    assert channel.events == ["send 1", "send 2"]
    await stop(task)


async def test_the_age_of_the_last_step_counts_only_while_work_is_pending():
    loop, channel, task = await make_loop()
    await settle()
    assert loop.step_age_s == 0
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=1))
    loop.wake()
    await settle()
    assert loop.step_age_s > 0
    channel.allowed.release()
    await settle()
    assert loop.step_age_s == 0
    await stop(task)
