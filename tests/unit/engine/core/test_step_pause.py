"""A pause of the step loop: nothing in flight, requests kept, orders in between."""

import asyncio

import pytest

from protos.engine.v1.worker_pb2 import OrderAnswer, WorkerCommand
from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import WorkerDiedError
from tests.support.engine_harness import RecordingSink, make_request
from tests.unit.engine.core.test_step_loop import make_loop, settle, stop


async def hold(loop, log):
    """Pauses the loop until the returned event is set."""
    end = asyncio.Event()

    async def task():
        async with loop.pause.hold() as orders:
            log.append("paused")
            assert orders is loop._channel.orders
            await end.wait()
        log.append("resumed")

    return end, asyncio.create_task(task())


@pytest.fixture
async def case():
    loop, channel, task = await make_loop()
    channel.orders = RankOrders(1, lambda command: None)
    yield loop, channel, task
    await stop(task)


async def test_a_pause_begins_once_no_step_is_in_flight_and_requests_go_on_after_it(case):
    loop, channel, _ = case
    sink = RecordingSink()
    loop.scheduler.add(make_request(sink, max_tokens=8))
    loop.wake()
    await settle()
    assert channel.events == ["send 1", "send 2"]
    end, holder = await hold(loop, channel.events)
    channel.allowed.release()
    await settle()
    assert channel.events[2:] == ["result 1", "publish 1"]
    channel.allowed.release()
    await settle()
    assert channel.events[4:] == ["result 2", "publish 1", "paused"]
    assert loop.step_age_s == 0
    loop.scheduler.add(make_request(RecordingSink(), request_id="other"))
    loop.wake()
    await settle()
    assert channel.events[6:] == ["paused"]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (1, 1)
    end.set()
    await holder
    await settle()
    assert channel.events[7:] == ["resumed", "send 3", "send 4"]


async def test_an_idle_loop_pauses_at_once_and_holders_take_turns(case):
    loop, channel, _ = case
    end, first = await hold(loop, channel.events)
    other_end, second = await hold(loop, channel.events)
    await settle()
    assert channel.events == ["paused"]
    end.set()
    await first
    await settle()
    assert channel.events == ["paused", "resumed", "paused"]
    other_end.set()
    await second


async def test_a_holder_that_gives_up_lets_the_loop_go_on(case):
    loop, channel, _ = case
    loop.scheduler.add(make_request(RecordingSink(), max_tokens=8))
    loop.wake()
    await settle()
    _, holder = await hold(loop, channel.events)
    await settle()
    await stop(holder)
    channel.allowed.release()
    await settle()
    assert channel.events[2:] == ["result 1", "send 3", "publish 1"]


async def test_a_lost_worker_ends_the_wait_for_a_pause(case):
    loop, channel, task = case
    loop.scheduler.add(make_request(RecordingSink()))
    loop.wake()
    await settle()
    _, holder = await hold(loop, channel.events)
    await settle()
    await stop(task)
    for waiting in (holder, (await hold(loop, channel.events))[1]):
        with pytest.raises(WorkerDiedError, match="before its steps had paused"):
            await waiting


async def test_an_order_has_the_answers_of_all_ranks_or_fails_with_the_worker():
    sent = []
    orders = RankOrders(2, sent.append)
    first = asyncio.create_task(orders.run(WorkerCommand()))
    second = asyncio.create_task(orders.run(WorkerCommand()))
    await settle()
    assert [each.order_id for each in sent] == [1, 2]
    orders.take(1, OrderAnswer(order_id=2, error="full"))
    orders.take(0, OrderAnswer(order_id=2))
    assert [each.error for each in await second] == ["", "full"]
    orders.take(0, OrderAnswer(order_id=1))
    orders.fail()
    with pytest.raises(WorkerDiedError):
        await first
    orders.take(1, OrderAnswer(order_id=1))
