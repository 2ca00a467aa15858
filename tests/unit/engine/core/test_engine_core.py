"""EngineCore around a fake worker: submissions, endings, drains and lost workers."""

import asyncio

import pytest
import structlog

from services.engine.capture_sizes.history import (
    history_path,
    load_history,
    read_history,
    save_history,
)
from services.engine.core import saved_history
from services.engine.core.engine_core import EngineCore
from services.engine.errors import (
    DeadlineExpiredError,
    DuplicateRequestError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from services.engine.request import FinishReason
from services.engine.worker.rank_process import WorkerDiedError
from tests.support.engine_harness import (
    RecordingSink,
    engine_config,
    make_request,
    running_core,
    step_limits,
)
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_worker import expected_output
from tests.support.passing_time import pass_time
from tests.support.waiting import until

NEVER_ENDS = 200


async def test_a_request_gets_its_tokens_and_a_finish_reason():
    async with running_core() as engine:
        sink = RecordingSink()
        request = make_request(sink)
        engine.core.submit(request)
        last = await sink.wait_for_end()
        assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
        assert last.finish_reason is FinishReason.LENGTH


async def test_a_sink_is_flushed_once_per_step_however_many_requests_it_has():
    async with running_core() as engine:
        sink = RecordingSink()
        for i in range(4):
            engine.core.submit(make_request(sink, request_id=f"r{i}"))
        await sink.wait_for(lambda s: sum(output.is_last for output in s.outputs) == 4)
        assert sink.num_flushes == 8


async def test_all_blocks_are_free_again_after_requests_end():
    async with running_core() as engine:
        before = engine.core.load().num_free_blocks
        sinks = [RecordingSink() for _ in range(6)]
        for i, sink in enumerate(sinks):
            engine.core.submit(make_request(sink, request_id=f"r{i}", prompt=range(40)))
        for sink in sinks:
            await sink.wait_for_end()
        assert engine.core.load().num_free_blocks == before


async def test_a_live_request_id_is_refused_and_a_finished_one_is_not():
    async with running_core() as engine:
        sink = RecordingSink()
        engine.core.submit(make_request(sink))
        with pytest.raises(DuplicateRequestError, match="'r'"):
            engine.core.submit(make_request(RecordingSink()))
        await sink.wait_for_end()
        again = RecordingSink()
        engine.core.submit(make_request(again))
        await again.wait_for_end()


async def test_nothing_is_taken_before_the_worker_is_ready():
    config = engine_config()
    core = EngineCore(
        config,
        limits=step_limits(config),
        make_executor=lambda: FakeExecutor(config),
        on_readiness=lambda _: None,
    )
    with pytest.raises(EngineUnavailableError, match="not ready"):
        core.submit(make_request(RecordingSink()))


async def test_a_full_queue_refuses_and_leaves_no_trace():
    async with running_core(engine_config(max_num_waiting=1)) as engine:
        engine.executors.last.hang()
        engine.core.submit(make_request(RecordingSink(), request_id="a"))
        with pytest.raises(QueueFullError):
            engine.core.submit(make_request(RecordingSink(), request_id="b"))
        refused = make_request(RecordingSink(), request_id="b")
        engine.core.abort(refused)
        assert refused.sink.outputs == []


async def test_a_prompt_that_cannot_fit_the_cache_is_refused():
    async with running_core(engine_config(num_kv_blocks=4)) as engine:
        with pytest.raises(InvalidRequestError, match="KV cache holds 48"):
            engine.core.submit(make_request(RecordingSink(), prompt=range(100)))


class TestAbort:
    async def test_frees_blocks_and_ends_the_request_during_decode(self):
        async with running_core() as engine:
            before = engine.core.load().num_free_blocks
            sink = RecordingSink()
            request = make_request(sink, max_tokens=NEVER_ENDS)
            engine.core.submit(request)
            await sink.wait_for(lambda s: len(s.token_ids) >= 3)
            engine.core.abort(request)
            assert sink.outputs[-1].finish_reason is FinishReason.ABORTED
            assert engine.core.load().num_free_blocks == before

    async def test_ends_a_request_that_still_waits(self):
        async with running_core(engine_config(max_num_seqs=1)) as engine:
            running, waiting = RecordingSink(), RecordingSink()
            engine.core.submit(make_request(running, request_id="a", max_tokens=NEVER_ENDS))
            request = make_request(waiting, request_id="b")
            engine.core.submit(request)
            await running.wait_for(lambda s: bool(s.token_ids))
            engine.core.abort(request)
            assert waiting.outputs[-1].finish_reason is FinishReason.ABORTED
            assert engine.core.load().num_waiting == 0

    async def test_ends_a_request_in_the_middle_of_its_prompt(self):
        config = engine_config(max_num_batched_tokens=8)
        async with running_core(config, step_time_s=0.005) as engine:
            before = engine.core.load().num_free_blocks
            sink = RecordingSink()
            request = make_request(sink, prompt=range(200))
            engine.core.submit(request)
            await until(lambda: engine.core.counters.num_steps >= 3)
            engine.core.abort(request)
            assert [output.finish_reason for output in sink.outputs] == [FinishReason.ABORTED]
            assert engine.core.load().num_free_blocks == before

    async def test_of_a_finished_request_changes_nothing(self):
        async with running_core() as engine:
            sink = RecordingSink()
            request = make_request(sink)
            engine.core.submit(request)
            await sink.wait_for_end()
            engine.core.abort(request)
            assert sum(output.is_last for output in sink.outputs) == 1

    async def test_leaves_the_others_output_as_it_was(self):
        async with running_core() as engine:
            kept, dropped = RecordingSink(), RecordingSink()
            request = make_request(kept, request_id="kept", max_tokens=40)
            victim = make_request(dropped, request_id="dropped", max_tokens=NEVER_ENDS)
            engine.core.submit(victim)
            engine.core.submit(request)
            await dropped.wait_for(lambda s: len(s.token_ids) >= 2)
            engine.core.abort(victim)
            await kept.wait_for_end()
            assert kept.token_ids == expected_output(request.prompt_token_ids, request.sampling)


class TestDeadline:
    async def test_that_has_passed_is_refused(self):
        async with running_core() as engine:
            with pytest.raises(DeadlineExpiredError):
                engine.core.submit(make_request(RecordingSink(), timeout_s=0))

    async def test_ends_a_request_whatever_it_is_doing(self, monkeypatch):
        async with running_core(engine_config(max_num_seqs=1), num_steps=3) as engine:
            running, waiting = RecordingSink(), RecordingSink()
            engine.core.submit(
                make_request(running, request_id="a", max_tokens=NEVER_ENDS, timeout_s=30)
            )
            engine.core.submit(make_request(waiting, request_id="b", timeout_s=30))
            await running.wait_for(lambda s: bool(s.token_ids))
            pass_time(monkeypatch, 30)
            assert isinstance((await waiting.wait_for_end()).error, DeadlineExpiredError)
            assert isinstance((await running.wait_for_end()).error, DeadlineExpiredError)
            assert engine.core.load().num_running == 0

    async def test_of_a_finished_request_does_not_touch_its_successor(self):
        async with running_core() as engine:
            first, second = RecordingSink(), RecordingSink()
            engine.core.submit(make_request(first, timeout_s=30))
            await first.wait_for_end()
            request = make_request(second)
            engine.core.submit(request)
            await second.wait_for_end()
            assert second.token_ids == expected_output(request.prompt_token_ids, request.sampling)


class TestLostWorker:
    @pytest.mark.parametrize("how", ["dies", "hangs"])
    async def test_is_replaced_and_its_requests_go_on_where_they_were(self, how, monkeypatch):
        async with running_core(engine_config(step_timeout_s=60), num_steps=3) as engine:
            sink = RecordingSink()
            request = make_request(sink, max_tokens=NEVER_ENDS)
            engine.core.submit(request)
            await sink.wait_for(lambda s: len(s.token_ids) == 3)
            executor = engine.executors.last
            del engine.executors.options["num_steps"]
            executor.die() if how == "dies" else pass_time(monkeypatch, 61)
            last = await sink.wait_for_end()
            assert last.finish_reason is FinishReason.LENGTH
            assert sink.token_ids == expected_output(request.prompt_token_ids, request.sampling)
            assert engine.readiness == [True, False, True]
            assert engine.core.counters.num_worker_restarts == 1
            assert executor.num_stacks_shown == (how == "hangs")

    async def test_a_cpu_may_take_minutes_for_a_step(self, monkeypatch):
        async with running_core(num_steps=3) as engine:
            sink = RecordingSink()
            engine.core.submit(make_request(sink, max_tokens=NEVER_ENDS))
            await sink.wait_for(lambda s: len(s.token_ids) == 3)
            pass_time(monkeypatch, 400)
            await asyncio.sleep(0.1)
            assert engine.core.counters.num_worker_restarts == 0

    async def test_without_a_successor_ends_its_requests_at_their_time_limit(self):
        config = engine_config(worker_patience_s=0.05)
        async with running_core(config) as engine:
            sink = RecordingSink()
            engine.core.submit(make_request(sink, max_tokens=NEVER_ENDS))
            await sink.wait_for(lambda s: bool(s.token_ids))
            engine.executors.options["start_error"] = "no device"
            engine.executors.last.die()
            last = await sink.wait_for_end()
            assert isinstance(last.error, EngineUnavailableError)
            assert not engine.core.is_ready

    async def test_that_is_lost_again_at_once_restarts_no_time_limit(self):
        # No request is a suspect where workers are killed from outside.
        async with running_core(engine_config(worker_patience_s=0.3), num_steps=0) as engine:
            sink = RecordingSink()
            engine.core.submit(make_request(sink))
            engine.executors.last.die(was_killed=True)
            while not sink.outputs:
                await engine.wait_until_lost()
                await engine.wait_until_ready()
                engine.executors.last.die(was_killed=True)
            assert isinstance(sink.outputs[-1].error, EngineUnavailableError)

    async def test_keeps_the_totals_of_its_scheduler(self):
        async with running_core() as engine:
            sink = RecordingSink()
            engine.core.submit(make_request(sink))
            await sink.wait_for_end()
            engine.executors.last.die()
            await engine.wait_until_lost()
            stats = engine.core.stats()
            done = stats.counters.scheduler
            assert (done.prompt_tokens, done.output_tokens) == (3, 8)

    async def test_does_not_keep_a_stopping_engine_alive(self):
        async with running_core() as engine:
            engine.executors.last.die()
        assert len(engine.executors.made) == 1

    async def test_is_not_looked_for_again_when_the_first_one_cannot_start(self):
        config = engine_config()
        core = EngineCore(
            config,
            limits=step_limits(config),
            make_executor=lambda: FakeExecutor(config, start_error="no weights"),
            on_readiness=lambda _: None,
        )
        with pytest.raises(WorkerDiedError, match="no weights"):
            await core.run()


class TestDrain:
    async def test_lets_live_requests_finish_and_refuses_new_ones(self):
        async with running_core() as engine:
            sink = RecordingSink()
            engine.core.submit(make_request(sink, max_tokens=40))
            drain = asyncio.create_task(engine.core.drain.run(60))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailableError, match="draining"):
                engine.core.submit(make_request(RecordingSink(), request_id="late"))
            report = await drain
            assert (report.num_finished, report.num_aborted) == (1, 0)
            assert sink.outputs[-1].finish_reason is FinishReason.LENGTH
            assert engine.readiness == [True, False]

    async def test_cuts_what_is_left_at_its_time_limit(self):
        async with running_core() as engine:
            engine.executors.last.hang()
            sink = RecordingSink()
            engine.core.submit(make_request(sink))
            report = await engine.core.drain.run(0.05)
            assert (report.num_finished, report.num_aborted) == (0, 1)
            assert isinstance(sink.outputs[-1].error, EngineUnavailableError)

    async def test_notifies_its_listeners_once(self):
        async with running_core() as engine:
            calls = []
            engine.core.drain.listeners.add(lambda: calls.append("drain"))
            await asyncio.gather(engine.core.drain.run(1), engine.core.drain.run(1))
            assert calls == ["drain"]


async def test_a_request_leaves_one_log_line_without_its_tokens():
    async with running_core() as engine:
        with structlog.testing.capture_logs() as lines:
            sink = RecordingSink()
            engine.core.submit(make_request(sink))
            await sink.wait_for_end()
            await asyncio.sleep(0)
        (line,) = [line for line in lines if line["event"] == "request_finished"]
        assert line["finish_reason"] == "length"
        assert (line["prompt_tokens"], line["output_tokens"]) == (3, 8)
        assert line["duration_ms"] >= line["ttft_ms"] >= line["queue_ms"] >= 0
        assert not {"prompt", "token_ids"} & set(line)


async def run_one(engine):
    sink = RecordingSink()
    engine.core.submit(make_request(sink))
    await sink.wait_for_end()


async def test_the_sizes_of_steps_are_kept_when_the_engine_ends(tmp_path):
    config = engine_config(histogram_dir=str(tmp_path))
    async with running_core(config) as engine:
        await run_one(engine)
        seen = engine.core.history.steps
        assert seen.others == {3: 1}
    kept = read_history(history_path(config))
    assert (kept.others, kept.decodes.keys()) == ({3: 1}, {1})
    assert kept.decodes[1] >= seen.decodes[1] >= 7


async def test_the_sizes_of_steps_are_kept_while_the_engine_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_history, "INTERVAL_S", 0.01)
    config = engine_config(histogram_dir=str(tmp_path))
    async with running_core(config) as engine:
        await run_one(engine)
        path = history_path(config)
        await until(lambda: path.exists() and read_history(path).others == {3: 1})


async def test_a_run_without_graphs_adds_its_steps_and_leaves_what_graphs_cost(tmp_path):
    config = engine_config(histogram_dir=str(tmp_path))
    path = history_path(config)
    async with running_core(config):
        pass
    assert not path.exists()
    history = load_history(config)
    history.others, history.decode_graphs, history.cudagraph_mode = {3: 1}, {8: 4096}, "FULL"
    save_history(history, path)
    async with running_core(config) as engine:
        await run_one(engine)
    kept = read_history(path)
    assert (kept.others, kept.decode_graphs, kept.cudagraph_mode) == ({3: 2}, {8: 4096}, "FULL")


async def test_a_request_may_end_before_the_next_worker_is_open(monkeypatch):
    async with running_core() as engine:
        sink = RecordingSink()
        request = make_request(sink, max_tokens=500)
        engine.core.submit(request)
        await sink.wait_for(lambda sink: bool(sink.outputs))
        scheduler = engine.core._steps.scheduler
        scheduler.abort(request)
        # While the next worker reads adapters, its scheduler does not have the request.
        monkeypatch.setattr(scheduler, "abort", lambda request: [].remove(request))
        monkeypatch.setattr(engine.core, "_is_open", False)
        engine.core.abort(request)
        assert sink.outputs[-1].finish_reason is FinishReason.ABORTED
        assert not len(engine.core.requests)
