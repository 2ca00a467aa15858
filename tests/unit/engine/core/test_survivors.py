"""Requests after the loss of their worker, and the request that caused it."""

import pytest

from services.engine.errors import EngineUnavailableError, RequestFaultError
from services.engine.request import FinishReason
from tests.support.engine_harness import (
    RecordingSink,
    engine_config,
    make_request,
    running_core,
)
from tests.support.fake_worker import expected_output

POISON = 666
POISONED = [1, 2, POISON]


async def wait_for_ends(sinks):
    return [await sink.wait_for_end() for sink in sinks]


def submit_innocents(engine, count=3):
    sinks = [RecordingSink() for _ in range(count)]
    requests = [
        make_request(sink, request_id=f"r{i}", prompt=range(10 * i, 10 * i + 20), max_tokens=60)
        for i, sink in enumerate(sinks)
    ]
    for request in requests:
        engine.core.submit(request)
    return requests, sinks


async def poison(engine, request_id="poison"):
    sink = RecordingSink()
    engine.core.submit(make_request(sink, request_id=request_id, prompt=POISONED))
    return await sink.wait_for_end()


async def test_the_poisonous_request_ends_after_two_losses_and_no_other_does():
    async with running_core(poison_token=POISON) as engine:
        baseline = engine.core.load().num_free_blocks
        requests, sinks = submit_innocents(engine)
        await sinks[0].wait_for(lambda sink: len(sink.token_ids) > 3)
        last = await poison(engine)
        assert isinstance(last.error, RequestFaultError)
        for request, sink, end in zip(requests, sinks, await wait_for_ends(sinks), strict=True):
            assert end.finish_reason is FinishReason.LENGTH
            assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
        assert engine.core.counters.num_worker_restarts == 2
        assert engine.core.load().num_free_blocks == baseline


async def test_a_request_of_the_last_steps_runs_alone_until_it_has_proved_harmless():
    async with running_core() as engine:
        _, sinks = submit_innocents(engine)
        for sink in sinks:
            await sink.wait_for(lambda s: bool(s.token_ids))
        engine.executors.last.die()
        await wait_for_ends(sinks)
        sizes = engine.executors.last.batch_sizes
        trials = sizes.index(3)
        assert set(sizes[:trials]) <= {1, 2}  # two once all but the last proved harmless
        assert sizes[:6] == [1] * 6


async def test_no_request_is_suspected_of_an_outside_kill():
    async with running_core() as engine:
        requests, sinks = submit_innocents(engine)
        for sink in sinks:
            await sink.wait_for(lambda s: bool(s.token_ids))
        engine.executors.last.die(was_killed=True)
        await wait_for_ends(sinks)
        assert engine.executors.last.batch_sizes[0] == 3
        assert [request.num_losses for request in requests] == [1] * 3


async def test_a_request_that_cost_two_workers_is_refused_and_another_prompt_is_not():
    async with running_core(poison_token=POISON) as engine:
        await poison(engine)
        await engine.wait_until_ready()
        num_restarts = engine.core.counters.num_worker_restarts
        with pytest.raises(RequestFaultError, match=r"internal error [0-9a-f]{12}"):
            await poison(engine, request_id="again")
        sink = RecordingSink()
        engine.core.submit(make_request(sink))
        assert (await sink.wait_for_end()).finish_reason is FinishReason.LENGTH
        assert engine.core.counters.num_worker_restarts == num_restarts


async def test_no_request_is_tried_a_fourth_time():
    async with running_core() as engine:
        _, sinks = submit_innocents(engine)
        for _ in range(3):
            seen = len(sinks[0].token_ids), len(sinks[1].token_ids)
            for sink, num in zip(sinks, seen, strict=False):
                await sink.wait_for(lambda s, num=num: len(s.token_ids) > num + 4)
            engine.executors.last.die()
            await engine.wait_until_lost()
        ends = await wait_for_ends(sinks[:1])
        assert isinstance(ends[0].error, EngineUnavailableError)
        assert "3 workers" in str(ends[0].error)


async def test_requests_that_waited_go_on_waiting():
    async with running_core(engine_config(max_num_seqs=1)) as engine:
        requests, sinks = submit_innocents(engine)
        await sinks[0].wait_for(lambda sink: bool(sink.token_ids))
        engine.executors.last.die()
        await wait_for_ends(sinks)
        for request, sink in zip(requests, sinks, strict=True):
            assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
        assert [request.num_losses for request in requests] == [1, 0, 0]


async def test_a_request_that_the_next_worker_has_no_room_for_ends_and_the_others_go_on():
    async with running_core() as engine:
        sinks = [RecordingSink() for _ in range(3)]
        requests = [
            make_request(sink, request_id=f"r{length}", prompt=range(length), max_tokens=num_output)
            for (length, num_output), sink in zip(
                ((3, 200), (7, 60), (140, 100)), sinks, strict=True
            )
        ]
        for request, sink in zip(requests, sinks, strict=True):
            engine.core.submit(request)
            await sink.wait_for(lambda s: bool(s.token_ids))
        small = requests[1]
        engine.executors.config = engine_config(num_kv_blocks=9)  # 128 tokens
        engine.executors.last.die(was_killed=True)
        for sink, found in ((sinks[0], "may reach 203 tokens"), (sinks[2], "has 140 tokens")):
            error = (await sink.wait_for_end()).error
            assert isinstance(error, EngineUnavailableError)
            assert found in str(error)
        assert (await sinks[1].wait_for_end()).finish_reason is FinishReason.LENGTH
        assert sinks[1].token_ids == expected_output(small.prompt_token_ids, small.sampling)
        assert engine.core.counters.num_worker_restarts == 1
        assert engine.core.load().num_free_blocks == 8
