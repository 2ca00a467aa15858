"""The engine's sleep around a fake worker: what becomes of requests, refusals and lost workers."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from services.engine.core.sleep import SleepMode
from services.engine.errors import (
    DeadlineExpiredError,
    EngineUnavailableError,
    InvalidRequestError,
    MemoryExhaustedError,
    NotPermittedError,
    SleepError,
)
from services.engine.request import FinishReason
from tests.support.engine_harness import (
    RecordingSink,
    engine_config,
    make_request,
    running_core,
)
from tests.support.fake_worker import expected_output
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

LONG_S = 60.0
WAIT, RECOMPUTE, ABORT = SleepMode.WAIT, SleepMode.RECOMPUTE, SleepMode.ABORT


@asynccontextmanager
async def engine_that_sleeps(*, num_steps=float("inf"), **flags):
    config = engine_config(enable_sleep=True, **flags)
    async with running_core(config, num_steps=num_steps) as engine:
        yield engine


async def start(engine, **options):
    """Submits a request that the worker stops to compute after three steps."""
    sink = RecordingSink()
    request = make_request(sink, **options)
    engine.core.submit(request)
    await sink.wait_for(lambda each: len(each.token_ids) >= 2)
    return request, sink


async def check_serves(engine, request_id="check"):
    sink = RecordingSink()
    request = make_request(sink, request_id=request_id)
    engine.core.submit(request)
    assert (await sink.wait_for_end()).finish_reason is FinishReason.LENGTH
    assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)


async def test_requests_end_before_the_engine_sleeps_and_new_ones_are_refused():
    async with engine_that_sleeps(num_steps=3) as engine:
        _, sink = await start(engine)
        falling = asyncio.create_task(engine.core.sleep.fall_asleep(1, WAIT, LONG_S))
        await engine.wait_until_lost()
        with pytest.raises(EngineUnavailableError, match="falling asleep"):
            engine.core.submit(make_request(RecordingSink(), request_id="late"))
        engine.executors.last.resume()
        report = await falling
        assert sink.outputs[-1].finish_reason is FinishReason.LENGTH
        assert report.num_bytes == 1
        assert engine.executors.last.orders_taken == ["sleep"]
        with pytest.raises(EngineUnavailableError, match="the engine is asleep"):
            engine.core.submit(make_request(RecordingSink(), request_id="later"))
        await engine.core.sleep.wake()
        assert engine.executors.last.orders_taken == ["sleep", "wake"]
        await check_serves(engine)


async def test_an_engine_whose_requests_do_not_end_in_time_stays_awake():
    async with engine_that_sleeps(num_steps=3) as engine:
        _, sink = await start(engine)
        with pytest.raises(DeadlineExpiredError, match="1 requests did not end"):
            await engine.core.sleep.fall_asleep(1, WAIT, 0.0)
        assert engine.core.is_ready
        engine.executors.last.resume()
        await sink.wait_for_end()
        await check_serves(engine)


async def test_a_caller_who_gives_up_waiting_keeps_the_engine_awake():
    async with engine_that_sleeps(num_steps=3) as engine:
        await start(engine)
        falling = asyncio.create_task(engine.core.sleep.fall_asleep(1, WAIT, LONG_S))
        await engine.wait_until_lost()
        falling.cancel()
        await engine.wait_until_ready()
        engine.executors.last.resume()
        await check_serves(engine)


async def test_kept_requests_are_computed_again_after_waking():
    async with engine_that_sleeps() as engine:
        request, sink = await start(engine, prompt=range(40), max_tokens=200)
        await engine.core.sleep.fall_asleep(2, RECOMPUTE, LONG_S)
        num_tokens, load = len(sink.token_ids), engine.core.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 1, 0)
        assert not engine.core.stats().num_cached_blocks
        await asyncio.sleep(0.01)
        assert len(sink.token_ids) == num_tokens < 200
        assert load.step_age_s == 0
        await engine.core.sleep.wake()
        assert (await sink.wait_for_end()).finish_reason is FinishReason.LENGTH
        assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
        assert request.num_preemptions == 1


async def test_deadlines_and_aborts_end_kept_requests_while_the_engine_sleeps():
    async with engine_that_sleeps() as engine:
        time = LoopTime()
        _, late = await start(engine, request_id="late", max_tokens=200, timeout_s=600)
        aborted, sink = await start(engine, request_id="aborted", max_tokens=200)
        await engine.core.sleep.fall_asleep(1, RECOMPUTE, LONG_S)
        engine.core.abort(aborted)
        assert sink.outputs[-1].finish_reason is FinishReason.ABORTED
        time.wind(600)
        assert isinstance((await late.wait_for_end()).error, DeadlineExpiredError)
        await engine.core.sleep.wake()
        await check_serves(engine)


async def test_aborted_requests_are_unavailable_so_that_frontends_continue_them_elsewhere():
    async with engine_that_sleeps() as engine:
        _, sink = await start(engine, max_tokens=200)
        await engine.core.sleep.fall_asleep(1, ABORT, LONG_S)
        assert isinstance(sink.outputs[-1].error, EngineUnavailableError)


async def test_cached_blocks_are_removed_for_frontends_and_subscribers():
    async with engine_that_sleeps(kv_events=True) as engine:
        sink = RecordingSink()
        engine.core.submit(make_request(sink, prompt=range(40)))
        await sink.wait_for_end()
        changes = engine.core.prefix_changes(None, max_keys=100)
        assert len(changes.added) == 2
        assert len(engine.core.block_events[0].snapshot()[1]) == 2
        await engine.core.sleep.fall_asleep(1, WAIT, LONG_S)
        after = engine.core.prefix_changes(changes.cursor, max_keys=100)
        assert set(after.removed) == set(changes.added)
        assert not engine.core.block_events[0].snapshot()[1]


async def test_a_second_sleep_changes_nothing_and_another_level_is_refused():
    async with engine_that_sleeps() as engine:
        sleep = engine.core.sleep
        assert (await sleep.wake()).num_bytes == 0
        with pytest.raises(InvalidRequestError, match="level is 3"):
            await sleep.fall_asleep(3, WAIT, LONG_S)
        await sleep.fall_asleep(1, WAIT, LONG_S)
        assert (await sleep.fall_asleep(1, WAIT, LONG_S)).num_bytes == 0
        with pytest.raises(SleepError, match="sleeps at level 1"):
            await sleep.fall_asleep(2, WAIT, LONG_S)
        assert engine.executors.last.orders_taken == ["sleep"]


async def test_an_engine_without_the_flag_does_not_sleep():
    async with running_core() as engine:
        for call in (engine.core.sleep.fall_asleep(1, WAIT, LONG_S), engine.core.sleep.wake()):
            with pytest.raises(NotPermittedError, match="--enable-sleep"):
                await call


async def test_a_refused_order_wakes_the_ranks_that_slept():
    async with engine_that_sleeps() as engine:
        engine.executors.last.order_errors["sleep"] = "the checkpoint has changed"
        with pytest.raises(SleepError, match="has changed"):
            await engine.core.sleep.fall_asleep(2, WAIT, LONG_S)
        assert engine.executors.last.orders_taken == ["sleep", "wake"]
        await check_serves(engine)


async def test_without_memory_the_engine_stays_asleep_and_ranks_that_woke_sleep_again():
    async with engine_that_sleeps() as engine:
        sleep, executor = engine.core.sleep, engine.executors.last
        await sleep.fall_asleep(1, WAIT, LONG_S)
        executor.order_errors["wake"] = "3 GiB are free"
        with pytest.raises(MemoryExhaustedError, match="stays asleep: 3 GiB are free"):
            await sleep.wake()
        assert executor.orders_taken == ["sleep", "wake", "sleep"]
        assert engine.core.stats().sleep_level == 1
        executor.order_errors.clear()
        await sleep.wake()
        await check_serves(engine)


async def test_a_worker_lost_asleep_has_no_successor_until_the_engine_wakes():
    async with engine_that_sleeps() as engine:
        request, sink = await start(engine, max_tokens=200)
        await engine.core.sleep.fall_asleep(1, RECOMPUTE, LONG_S)
        engine.executors.last.die(was_killed=True)
        await until(lambda: not engine.core.load().num_waiting)
        await asyncio.sleep(0.3)  # longer than the pause before a restart
        assert len(engine.executors.made) == 1
        assert engine.core.stats().sleep_state == "asleep"
        await engine.core.sleep.wake()
        assert len(engine.executors.made) == 2
        await sink.wait_for_end()
        assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)


async def test_a_worker_lost_while_it_wakes_is_replaced():
    async with engine_that_sleeps() as engine:
        await engine.core.sleep.fall_asleep(1, WAIT, LONG_S)
        engine.executors.last.unanswered.add("wake")
        waking = asyncio.create_task(engine.core.sleep.wake())
        await until(lambda: "wake" in engine.executors.last.orders_taken)
        engine.executors.last.die()
        await waking
        assert len(engine.executors.made) == 2
        await check_serves(engine)


@pytest.mark.parametrize("kind", ["sleep", "wake"])
async def test_a_worker_that_does_not_answer_is_replaced(kind):
    async with engine_that_sleeps(worker_start_timeout_s=LONG_S, step_timeout_s=1.0) as engine:
        sleep, executor, time = engine.core.sleep, engine.executors.last, LoopTime()
        executor.unanswered.add(kind)
        if kind == "wake":
            await sleep.fall_asleep(1, WAIT, LONG_S)
        order = sleep.wake() if kind == "wake" else sleep.fall_asleep(1, WAIT, LONG_S)
        ordered = asyncio.create_task(order)
        await until(lambda: kind in executor.orders_taken)
        time.wind(LONG_S)
        if kind == "wake":
            await ordered
        else:
            with pytest.raises(EngineUnavailableError, match="did not answer"):
                await ordered
        await until(lambda: len(engine.executors.made) >= 2)
        await engine.wait_until_ready()
        await check_serves(engine)


async def test_a_worker_lost_while_requests_end_keeps_the_engine_awake():
    async with engine_that_sleeps(num_steps=3) as engine:
        await start(engine, max_tokens=200)
        falling = asyncio.create_task(engine.core.sleep.fall_asleep(1, RECOMPUTE, LONG_S))
        await until(lambda: not engine.core.sleep.is_awake)
        engine.executors.last.die()
        with pytest.raises(EngineUnavailableError, match="worker was lost"):
            await falling
        await until(lambda: engine.core.is_ready)


async def test_a_drain_ends_requests_that_a_sleeping_engine_keeps():
    async with engine_that_sleeps() as engine:
        _, sink = await start(engine, max_tokens=200)
        await engine.core.sleep.fall_asleep(1, RECOMPUTE, LONG_S)
        report = await engine.core.drain.run(0.0)
        assert report.num_aborted == 1
        assert isinstance(sink.outputs[-1].error, EngineUnavailableError)


async def test_an_engine_that_starts_asleep_has_no_worker_before_it_is_woken():
    config = engine_config(enable_sleep=True, start_asleep=True)
    async with running_core(config) as engine:
        sleep = engine.core.sleep
        assert (sleep.state.value, sleep.level) == ("asleep", 2)
        with pytest.raises(EngineUnavailableError, match="the engine is asleep"):
            engine.core.submit(make_request(RecordingSink()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.executors.made == []
        await sleep.wake()
        await check_serves(engine)
        await sleep.fall_asleep(1, WAIT, LONG_S)
        await sleep.wake()
        assert len(engine.executors.made) == 1


async def test_a_worker_that_cannot_start_ends_the_call_that_wanted_it():
    config = engine_config(enable_sleep=True, start_asleep=True)
    async with running_core(config, start_error="the GPU has no memory") as engine:
        with pytest.raises(EngineUnavailableError, match="the engine stops: the GPU has no memory"):
            await engine.core.sleep.wake()


def test_a_start_asleep_needs_sleep():
    with pytest.raises(ValueError, match="--start-asleep needs --enable-sleep"):
        engine_config(start_asleep=True)
