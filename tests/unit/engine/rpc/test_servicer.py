"""The methods beside Session, over a real socket, around a fake worker."""

import hashlib
import json
import shutil

import grpc
import pytest

from protos.common.v1 import request_story_pb2, sampling_pb2
from protos.engine.v1.engine_pb2 import (
    DrainRequest,
    ExplainRequestRequest,
    GenerateRequest,
    GetModelInfoRequest,
    GetStatsRequest,
    GetTokenizerRequest,
    WatchStepsRequest,
)
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.request import SamplingParams
from tests.support.engine_harness import SEED, engine_config, model_folder, running_service
from tests.support.fake_worker import expected_output
from tests.support.waiting import until

LONG = 200
UNKNOWN_FIELD = b"\xf8\x06\x01"


def ask(*, prompt=(1, 2, 3), max_tokens=8, sampling=None, **fields):
    return GenerateRequest(
        prompt_token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(seed=SEED, max_tokens=max_tokens, **(sampling or {})),
        **fields,
    )


def expected(prompt=(1, 2, 3), max_tokens=8):
    return expected_output(prompt, SamplingParams(seed=SEED, max_tokens=max_tokens))


async def collect(call):
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses, [token_id for response in responses for token_id in response.token_ids]


class TestGenerate:
    async def test_streams_tokens_and_ends_with_reason_and_usage(self):
        async with running_service() as service:
            responses, token_ids = await collect(service.stub.Generate(ask()))
            assert token_ids == expected()
            assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
            assert responses[-1].usage.output_tokens == 8

    async def test_names_the_stop_token_that_ended_it(self):
        stop = expected()[3]
        async with running_service() as service:
            call = service.stub.Generate(ask(sampling={"stop_token_ids": [stop]}))
            responses, _ = await collect(call)
            assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
            assert responses[-1].stop_token_id == stop

    async def test_log_probabilities_come_where_they_are_asked_for(self):
        async with running_service() as service:
            call = service.stub.Generate(ask(sampling={"logprobs": 1}))
            responses, token_ids = await collect(call)
            positions = [entry for response in responses for entry in response.logprobs]
            assert [position.chosen.token_id for position in positions] == token_ids

    @pytest.mark.parametrize(
        ("request_", "code"),
        [
            (ask(prompt=()), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(prompt=range(256)), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(request_id="x" * 257), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(sampling={"temperature": 101}), grpc.StatusCode.INVALID_ARGUMENT),
            (ask(model="other"), grpc.StatusCode.NOT_FOUND),
            (GenerateRequest.FromString(UNKNOWN_FIELD), grpc.StatusCode.INVALID_ARGUMENT),
        ],
        ids=["empty", "long", "name", "sampling", "model", "unknown"],
    )
    async def test_a_refusal_comes_before_any_message_and_is_counted(self, request_, code):
        async with running_service() as service:
            call = service.stub.Generate(request_)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(call)
            assert error.value.code() is code
            stats = await service.stub.GetStats(GetStatsRequest())
            assert dict(stats.rejected) == {code.name: 1}

    async def test_a_live_name_is_refused(self):
        async with running_service(num_steps=1) as service:
            first = service.stub.Generate(ask(request_id="same", max_tokens=LONG))
            await first.read()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(service.stub.Generate(ask(request_id="same")))
            assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
            first.cancel()

    async def test_a_full_queue_pushes_back_in_the_trailers(self):
        config = engine_config(max_num_waiting=1, max_num_seqs=1)
        async with running_service(config) as service:
            service.executors.last.hang()
            calls = []
            for _ in range(2):  # the second one waits once the first one runs
                calls.append(service.stub.Generate(ask(max_tokens=LONG)))
                await calls[-1].initial_metadata()
                await until(lambda: service.core.load().num_running == 1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(service.stub.Generate(ask()))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0

    async def test_a_message_over_the_limit_is_refused(self):
        async with running_service(engine_config(max_message_bytes=2**16)) as service:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(service.stub.Generate(ask(prompt=[1] * 2**17)))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_a_cancelled_call_frees_its_blocks(self):
        async with running_service(num_steps=1) as service:
            before = service.core.load().num_free_blocks
            call = service.stub.Generate(ask(max_tokens=LONG))
            await call.read()
            call.cancel()
            await until(lambda: service.core.load().num_free_blocks == before)
            assert service.core.counters.finished["aborted"] == 1

    async def test_the_calls_deadline_stops_the_work(self):
        async with running_service(step_time_s=0.01) as service:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(service.stub.Generate(ask(max_tokens=LONG), timeout=0.1))
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: service.core.load().num_running == 0)

    async def test_a_lost_worker_without_a_time_limit_to_wait_ends_the_call_with_unavailable(self):
        async with running_service(engine_config(worker_patience_s=0), num_steps=1) as service:
            call = service.stub.Generate(ask(max_tokens=LONG))
            await call.read()
            service.executors.last.die()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(call)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_an_internal_error_is_reported_as_an_id_only(self):
        async with running_service(model=model_folder(default_sampling=None)) as service:
            with pytest.raises(grpc.aio.AioRpcError, match=r"internal error [0-9a-f]{12}") as error:
                await collect(service.stub.Generate(ask()))
            assert error.value.code() is grpc.StatusCode.INTERNAL
            assert "NoneType" not in error.value.details()


class TestInformation:
    async def test_model_info_has_limits_and_hash(self):
        model = model_folder(eos_token_ids=frozenset({9, 4}))
        async with running_service(model=model) as service:
            info = await service.stub.GetModelInfo(GetModelInfoRequest())
            assert (info.model, info.architecture) == ("fake", "FakeForCausalLM")
            assert (info.max_model_len, info.vocab_size) == (256, 1000)
            assert list(info.eos_token_ids) == [4, 9]
            assert info.tokenizer_sha256 == model.tokenizer.sha256
            assert (info.num_blocks, info.device_name, info.dtype) == (64, "cpu", "float32")
            assert info.max_running == 8

    async def test_the_tokenizer_arrives_whole_and_hashes_as_promised(self, tmp_path):
        shutil.copy(TINY_CHECKPOINT / "config.json", tmp_path)
        (tmp_path / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {}}, "rest": "x" * 700_000})
        )
        (tmp_path / "chat_template.jinja").write_bytes(b"")
        model = ModelFolder.open(tmp_path, name="fake", max_model_len=None)
        async with running_service(model=model) as service:
            contents = {}
            async for part in service.stub.GetTokenizer(GetTokenizerRequest()):
                contents[part.file_name] = contents.get(part.file_name, b"") + part.content
        digest = hashlib.sha256()
        for name, content in contents.items():
            digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
        assert digest.hexdigest() == model.tokenizer.sha256
        assert list(contents) == ["chat_template.jinja", "tokenizer.json"]

    async def test_stats_count_what_happened(self):
        async with running_service() as service:
            await collect(service.stub.Generate(ask()))
            stats = await service.stub.GetStats(GetStatsRequest())
            assert stats.ready
            assert (stats.prompt_tokens, stats.output_tokens) == (3, 8)
            assert dict(stats.finished) == {"length": 1}
            assert dict(stats.graph_dispatch) == {"unsupported": stats.num_steps}
            assert stats.num_steps >= 8

    async def test_sizes_of_steps_come_where_they_are_asked_for(self):
        async with running_service() as service:
            await collect(service.stub.Generate(ask(max_tokens=8)))
            stats = await service.stub.GetStats(GetStatsRequest())
            assert not stats.decode_steps
            assert (stats.decode_coverage.limit, stats.other_coverage.limit) == (8, 64)
            stats = await service.stub.GetStats(GetStatsRequest(include_step_sizes=True))
            assert dict(stats.other_steps) == {3: 1}
            assert list(stats.decode_steps) == [1]
            assert stats.decode_steps[1] + 1 == stats.num_steps

    async def test_an_unknown_field_is_refused_everywhere(self):
        async with running_service() as service:
            for method, message in (
                (service.stub.GetStats, GetStatsRequest),
                (service.stub.GetModelInfo, GetModelInfoRequest),
                (service.stub.Drain, DrainRequest),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="field 111"):
                    await method(message.FromString(UNKNOWN_FIELD))


class TestWatchSteps:
    async def test_shows_steps_without_token_ids(self):
        async with running_service() as service:
            watch = service.stub.WatchSteps(WatchStepsRequest())
            await watch.initial_metadata()
            await collect(service.stub.Generate(ask()))
            first = await watch.read()
            assert first.descriptor.context.num_tokens == 3
            assert not first.descriptor.row_assignments[0].token_ids
            assert not first.result.token_ids
            watch.cancel()

    async def test_shows_token_ids_only_where_the_operator_allows_it(self):
        request = WatchStepsRequest(include_token_ids=True)
        async with running_service() as service:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.stub.WatchSteps(request).read()
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with running_service(engine_config(allow_watch_tokens=True)) as service:
            watch = service.stub.WatchSteps(request)
            await watch.initial_metadata()
            await collect(service.stub.Generate(ask()))
            assert (await watch.read()).result.token_ids
            watch.cancel()

    async def test_a_snapshot_needs_the_operators_leave_too(self):
        request = WatchStepsRequest(include_snapshot=True)
        async with running_service() as service:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.stub.WatchSteps(request).read()
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED

    async def test_a_snapshot_comes_first_and_the_steps_follow_it(self):
        request = WatchStepsRequest(include_token_ids=True, include_snapshot=True)
        config = engine_config(allow_watch_tokens=True)
        async with running_service(config, num_steps=1) as service:
            call = service.stub.Generate(ask(max_tokens=LONG))
            await call.read()
            watch = service.stub.WatchSteps(request)
            await watch.initial_metadata()
            service.executors.last.resume()
            snapshot = (await watch.read()).snapshot
            (row,) = snapshot.rows
            assert row.assignment.num_prompt_tokens == 3
            # All that was sampled is known; the newest token alone is not computed yet.
            assert len(row.assignment.token_ids) == 4 * (row.num_computed_tokens + 1)
            assert len(row.block_ids) == 4 * -(-row.num_computed_tokens // config.cache.block_size)
            steps = [await watch.read() for _ in range(3)]
            assert not any(step.HasField("snapshot") for step in steps)
            first = snapshot.next_step_id
            assert [step.descriptor.step_id for step in steps] == [first, first + 1, first + 2]
            watch.cancel()
            settings = snapshot.engine
            assert (settings.model, settings.dtype, settings.device_name) == (
                "fake",
                "float32",
                "cpu",
            )
            assert (settings.max_num_seqs, settings.num_blocks) == (8, 64)

    async def test_a_stream_with_a_snapshot_ends_with_its_worker(self):
        request = WatchStepsRequest(include_token_ids=True, include_snapshot=True)
        async with running_service(engine_config(allow_watch_tokens=True)) as service:
            watch = service.stub.WatchSteps(request)
            await watch.read()
            service.executors.last.die()
            assert await watch.read() is grpc.aio.EOF

    async def test_a_worker_lost_before_the_snapshot_is_an_error(self):
        request = WatchStepsRequest(include_token_ids=True, include_snapshot=True)
        config = engine_config(allow_watch_tokens=True)
        async with running_service(config, num_steps=1) as service:
            call = service.stub.Generate(ask(max_tokens=LONG))
            await call.read()
            watch = service.stub.WatchSteps(request)
            await watch.initial_metadata()
            service.executors.last.die()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await watch.read()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class TestDrain:
    async def test_answers_when_all_is_done_and_the_server_then_exits(self):
        async with running_service(num_steps=1) as service:
            call = service.stub.Generate(ask(max_tokens=40))
            await call.read()
            draining = service.stub.Drain(DrainRequest())
            await until(lambda: service.core.drain.has_begun)
            service.executors.last.resume()
            drained = await draining
            assert (drained.num_finished, drained.num_aborted) == (1, 0)
            assert (await collect(call))[0][-1].finish_reason
            assert await service.server.wait() == 0

    async def test_cuts_what_runs_at_the_callers_limit(self):
        async with running_service(num_steps=1) as service:
            call = service.stub.Generate(ask(max_tokens=LONG))
            await call.read()
            drained = await service.stub.Drain(DrainRequest(timeout_ms=50))
            assert (drained.num_finished, drained.num_aborted) == (0, 1)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(call)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


class TestExplainRequest:
    async def test_says_where_the_time_of_an_ended_request_went(self):
        async with running_service() as service:
            await collect(service.stub.Generate(ask(request_id="r", max_tokens=8)))
            response = await service.stub.ExplainRequest(ExplainRequestRequest(request_id="r"))
            story = response.story
            assert (story.request_id, story.engine_id) == ("r", service.core.engine_id)
            assert (story.end, story.prompt_tokens, story.output_tokens) == ("length", 3, 8)
            assert story.stage == request_story_pb2.REQUEST_STAGE_UNSPECIFIED
            assert sum(each.seconds for each in story.stages) == pytest.approx(story.duration_s)
            assert story.stages[-1].stage == request_story_pb2.REQUEST_STAGE_DECODE
            assert (story.num_prefill_steps, story.num_decode_steps) == (1, 7)
            assert 0 < story.time_to_first_token_s <= story.duration_s
            assert 0 < story.longest_gap.seconds <= story.duration_s
            assert (story.longest_gap.num_tokens, story.longest_gap.batch_size) == (1, 1)

    async def test_says_what_a_live_request_does(self):
        async with running_service() as service:
            call = service.stub.Generate(ask(request_id="r", max_tokens=LONG))
            await call.read()
            request = ExplainRequestRequest(request_id="r")
            story = (await service.stub.ExplainRequest(request)).story
            assert (story.end, story.stage) == ("", request_story_pb2.REQUEST_STAGE_DECODE)
            call.cancel()
            await until(lambda: not len(service.core.requests))
            story = (await service.stub.ExplainRequest(request)).story
            assert story.end == "aborted"

    async def test_an_unknown_request_is_not_found(self):
        async with running_service() as service:
            with pytest.raises(grpc.aio.AioRpcError, match="no live request has this id") as caught:
                await service.stub.ExplainRequest(ExplainRequestRequest(request_id="r"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
