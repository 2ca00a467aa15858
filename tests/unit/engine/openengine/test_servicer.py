"""OpenEngine's services over a real socket, around a fake worker."""

import re
from contextlib import asynccontextmanager

import grpc
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.engine.v1.engine_pb2 import GetStatsRequest
from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    AbortRequest,
    GenerateRequest,
    GetKvEventSourcesRequest,
    GetLoadRequest,
    GetModelInfoRequest,
    GetServerInfoRequest,
    HealthRequest,
    SubscribeKvEventsRequest,
)
from protos.openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.errors import EngineError
from services.engine.kv_cache.block_events import MAX_EVENTS, BlockContent, Tier
from services.engine.openengine.failure import ERROR_CODES
from services.engine.request import SamplingParams
from tests.support.engine_harness import SEED, engine_config, model_folder, running_service
from tests.support.fake_worker import expected_output
from tests.support.waiting import until

TINY = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)
PROMPT = (1, 2, 3)
LONG = 200


@asynccontextmanager
async def orchestrated(config=None, **options):
    settings = engine_config(openengine_grpc=True, **(config or {}))
    async with running_service(settings, **options) as service:
        yield service, InferenceStub(service.channel), ControlStub(service.channel)


def ask(*, prompt=PROMPT, request_id="r", max_tokens=8, sampling=None, stopping=None, **fields):
    return GenerateRequest(
        request_id=request_id,
        token_ids={"ids": prompt},
        sampling={"seed": SEED, "temperature": 1.0, **(sampling or {})},
        stopping={"max_tokens": max_tokens, **(stopping or {})},
        **fields,
    )


def expected(max_tokens=8, index=0):
    return expected_output(PROMPT, SamplingParams(seed=SEED + index, max_tokens=max_tokens))


async def read_all(call):
    told = []
    while (response := await call.read()) is not grpc.aio.EOF:
        told.append(response)
    return told


def tokens_of(told, index=0):
    return [
        info
        for each in told
        if each.HasField("token") and each.token.output_index == index
        for info in each.token.tokens
    ]


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_stream_sends_each_token_once_and_ends_with_reason_and_usage():
    async with orchestrated() as (_, inference, _):
        told = await read_all(inference.Generate(ask()))
        assert [info.token_id for info in tokens_of(told)] == expected()
        last = told[-1]
        assert last.finished.reason == openengine_pb2.FINISH_REASON_LENGTH
        assert last.finished.HasField("output_index")
        usage = last.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 8, 11)
        assert not any(each.HasField("usage") for each in told[:-1])
        assert {each.request_id for each in told} == {"r"}


async def test_several_outputs_have_the_seeds_after_the_first_one_and_one_usage():
    async with orchestrated() as (service, inference, _):
        told = await read_all(inference.Generate(ask(sampling={"num_sequences": 3})))
        for index in range(3):
            ids = [info.token_id for info in tokens_of(told, index)]
            assert ids == expected(index=index)
        assert sum(each.HasField("finished") for each in told) == 3
        [usage] = [each.usage for each in told if each.HasField("usage")]
        assert told[-1].usage == usage
        assert usage.completion_tokens == 24
        assert service.core.load().num_running == 0


async def test_a_stop_token_of_the_request_and_an_end_of_sequence_are_told_apart():
    fourth = expected()[3]
    stopping = {"conditions": [{"stop_token_id": fourth}]}
    async with orchestrated() as (_, inference, _):
        told = await read_all(inference.Generate(ask(stopping=stopping)))
        assert told[-1].finished.reason == openengine_pb2.FINISH_REASON_STOP
        assert told[-1].finished.stop_match.stop_token_id == fourth
    model = model_folder(eos_token_ids=frozenset({fourth}))
    async with orchestrated(model=model) as (_, inference, _):
        told = await read_all(inference.Generate(ask()))
        assert told[-1].finished.stop_match.eos_token_id == fourth


async def test_a_stop_text_ends_the_request_with_the_token_that_completes_it():
    options = {"model": TINY, "vocab_size": TINY.vocab_size}
    decode = tokenizers.Tokenizer.from_buffer(TINY.tokenizer_json).decode
    async with orchestrated(**options) as (service, inference, _):
        whole = tokens_of(await read_all(inference.Generate(ask(max_tokens=40))))
        stop = re.findall("[a-z]{3}", decode([info.token_id for info in whole])[10:])[0]
        stopping = {"conditions": [{"stop_text": stop}]}
        told = await read_all(inference.Generate(ask(max_tokens=LONG, stopping=stopping)))
        assert told[-1].finished.stop_match.stop_text == stop
        assert stop in decode([info.token_id for info in tokens_of(told)])
        await until(lambda: not service.core.load().num_running)


async def test_log_probabilities_of_output_and_prompt():
    response = {
        "return_output_logprobs": True,
        "output_candidates": {"top_n": 2},
        "return_prompt_logprobs": True,
        "prompt_candidates": {"top_n": 1},
    }
    async with orchestrated() as (_, inference, _):
        told = await read_all(inference.Generate(ask(response=response)))
        [prompt] = [each.prompt for each in told if each.HasField("prompt")]
        assert [info.token_id for info in prompt.tokens] == list(PROMPT)
        assert [info.HasField("logprob") for info in prompt.tokens] == [False, True, True]
        assert [len(info.candidates) for info in prompt.tokens] == [0, 1, 1]
        for info in tokens_of(told):
            assert info.HasField("logprob")
            assert [each.rank for each in info.candidates] == [1, 2]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (ask(prompt=()), grpc.StatusCode.INVALID_ARGUMENT),
        (ask(prompt=range(256)), grpc.StatusCode.INVALID_ARGUMENT),
        (ask(model="other"), grpc.StatusCode.NOT_FOUND),
        (ask(lora_name="a"), grpc.StatusCode.NOT_FOUND),
        (ask(request_id="x" * 257), grpc.StatusCode.INVALID_ARGUMENT),
        (ask(stopping={"conditions": [{"stop_text": ""}]}), grpc.StatusCode.INVALID_ARGUMENT),
        (GenerateRequest.FromString(b"\xf8\x06\x01"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["empty", "long", "model", "adapter", "name", "stop", "unknown"],
)
async def test_a_refusal_is_a_status_before_any_message_and_is_counted(message, code):
    async with orchestrated() as (service, inference, _):
        assert await status_of(read_all(inference.Generate(message))) is code
        stats = await service.stub.GetStats(GetStatsRequest())
        assert sum(stats.rejected.values()) == 1


@pytest.mark.parametrize(
    ("metadata", "is_served"),
    [
        ((("openengine-priority", "7"),), True),
        ((("openengine-priority", "high"),), False),
        ((("openengine-priority", "1"), ("openengine-priority", "2")), False),
        ((("openengine-target-dp-rank", "0"),), False),
    ],
)
async def test_priority_comes_as_metadata_and_a_rank_cannot_be_chosen(metadata, is_served):
    async with orchestrated() as (_, inference, _):
        call = inference.Generate(ask(), metadata=metadata)
        if is_served:
            assert len(tokens_of(await read_all(call))) == 8
        else:
            assert await status_of(read_all(call)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_abort_ends_the_request_that_it_names():
    async with orchestrated(num_steps=1) as (service, inference, control):
        call = inference.Generate(ask(max_tokens=LONG))
        await call.read()
        answer = await control.Abort(AbortRequest(request_id="r"))
        assert answer.status == openengine_pb2.ABORT_STATUS_ABORTED
        service.executors.last.resume()
        told = await read_all(call)
        assert told[-1].finished.reason == openengine_pb2.FINISH_REASON_CANCELLED
        answer = await control.Abort(AbortRequest(request_id="r"))
        assert answer.status == openengine_pb2.ABORT_STATUS_ALREADY_FINISHED
        assert await status_of(control.Abort(AbortRequest())) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_live_request_of_a_name_is_refused():
    async with orchestrated(num_steps=1) as (_, inference, _):
        call = inference.Generate(ask(max_tokens=LONG))
        await call.read()
        code = await status_of(read_all(inference.Generate(ask())))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()


async def test_a_failure_of_an_accepted_request_is_the_last_message():
    config = {"worker_patience_s": 0.05}
    async with orchestrated(config, num_steps=1) as (service, inference, _):
        call = inference.Generate(ask(max_tokens=LONG))
        await call.read()
        service.executors.options["start_error"] = "no weights"
        service.executors.last.die()
        told = await read_all(call)
        assert told[-1].error.code == openengine_pb2.ERROR_CODE_DRAINING
        assert told[-1].error.retryable


def test_every_error_has_a_code():
    assert set(ERROR_CODES) == set(EngineError.__subclasses__())


async def test_the_engine_describes_itself_and_its_load():
    config = {"num_kv_blocks": 64}
    async with orchestrated(config) as (service, inference, control):
        server = await control.GetServerInfo(GetServerInfoRequest())
        assert (server.engine_name, server.schema_revision) == ("octavo", 1)
        assert server.engine_role == openengine_pb2.ENGINE_ROLE_AGGREGATED
        assert (server.capacity.kv_block_size, server.capacity.total_kv_blocks) == (16, 63)
        model = await control.GetModelInfo(GetModelInfoRequest(model="fake"))
        assert (model.served_model_name, model.max_context_length) == ("fake", 256)
        assert (model.supports_token_ids_input, model.supports_text_input) == (True, False)
        # Dynamo's sidecar names the folder, from which it reads the tokenizer.
        assert await control.GetModelInfo(GetModelInfoRequest(model=model.model_id)) == model
        assert await status_of(control.GetModelInfo(GetModelInfoRequest(model="x"))) is (
            grpc.StatusCode.NOT_FOUND
        )
        await read_all(inference.Generate(ask(model=model.model_id)))
        load = await control.GetLoad(GetLoadRequest(include_per_rank=True))
        assert (load.running_requests, load.used_kv_blocks, load.total_kv_blocks) == (0, 0, 63)
        assert len(load.ranks) == 1
        health = await control.Health(HealthRequest())
        assert health.state == openengine_pb2.HEALTH_STATE_READY
        service.executors.options["start_error"] = "no weights"
        service.executors.last.die()
        await until(lambda: not service.core.is_ready)
        health = await control.Health(HealthRequest())
        assert health.state == openengine_pb2.HEALTH_STATE_NOT_READY


async def test_the_protocol_is_served_only_where_it_is_asked_for():
    async with running_service() as service:
        call = ControlStub(service.channel).Health(HealthRequest())
        assert await status_of(call) is grpc.StatusCode.UNIMPLEMENTED
    check = health_pb2.HealthCheckRequest(service="openengine.v1.Inference")
    async with orchestrated() as (service, _, _):
        answer = await health_pb2_grpc.HealthStub(service.channel).Check(check)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


class TestKvEvents:
    async def test_without_the_flag_there_are_no_sources(self):
        async with orchestrated() as (_, _, control):
            assert not (await control.GetKvEventSources(GetKvEventSourcesRequest())).sources
            call = control.SubscribeKvEvents(SubscribeKvEventsRequest())
            assert await status_of(call.read()) is grpc.StatusCode.PERMISSION_DENIED

    async def test_a_subscriber_without_a_snapshot_sees_what_comes(self):
        prompt = list(range(5, 55))
        async with orchestrated({"kv_events": True}) as (_, inference, control):
            [source] = (await control.GetKvEventSources(GetKvEventSourcesRequest())).sources
            assert (source.transport, source.encoding) == ("grpc", "protobuf")
            assert (source.data_parallel_rank, source.HasField("data_parallel_rank")) == (0, True)
            stream = control.SubscribeKvEvents(SubscribeKvEventsRequest(data_parallel_ranks=[0]))
            await stream.initial_metadata()
            await read_all(inference.Generate(ask(prompt=prompt, max_tokens=2)))
            [event] = (await stream.read()).batch.events
            stored = event.block_stored
            assert list(stored.token_ids) == prompt[:48]
            assert (stored.block_size, len(stored.block_hashes)) == (16, 3)
            assert stored.medium == openengine_pb2.STORAGE_MEDIUM_GPU
            assert not stored.HasField("parent_block_hash")
            for each in stored.block_hashes:
                assert each.encoding == "decimal_int64"
                assert str(int(each.value)).encode() == each.value
            stream.cancel()

    async def test_an_adapters_blocks_have_its_name(self):
        async with orchestrated({"kv_events": True}) as (service, _, control):
            [record] = service.core.block_events
            record.stored(b"k" * 32, BlockContent(None, bytes(64), "sql"), Tier.GPU)
            stream = control.SubscribeKvEvents(SubscribeKvEventsRequest(include_snapshot=True))
            _, event = (await stream.read()).batch.events
            assert event.block_stored.lora_name == "sql"
            stream.cancel()

    async def test_a_snapshot_begins_with_a_clearing_and_numbers_have_no_gaps(self):
        async with orchestrated({"kv_events": True}) as (service, _, control):
            [record] = service.core.block_events
            for number in range(600):
                key = number.to_bytes(32, "little")
                record.stored(key, BlockContent(None, bytes(64)), Tier.HOST)
            stream = control.SubscribeKvEvents(SubscribeKvEventsRequest(include_snapshot=True))
            first, second = [(await stream.read()).batch for _ in range(2)]
            record.removed(bytes(32), Tier.HOST)
            third = (await stream.read()).batch
            assert first.events[0].HasField("all_blocks_cleared")
            assert first.events[1].block_stored.medium == openengine_pb2.STORAGE_MEDIUM_CPU_PINNED
            assert third.events[0].block_removed.block_hashes[0].value == b"0"
            start = first.sequence_number
            assert [second.sequence_number, third.sequence_number] == [start + 1, start + 2]
            stream.cancel()
            request = SubscribeKvEventsRequest(start_sequence_number=third.sequence_number)
            resumed = control.SubscribeKvEvents(request)
            assert (await resumed.read()).batch.events == third.events
            resumed.cancel()

    async def test_missed_events_end_the_stream_with_an_error(self):
        async with orchestrated({"kv_events": True}) as (service, _, control):
            stream = control.SubscribeKvEvents(SubscribeKvEventsRequest(include_snapshot=True))
            await stream.read()
            [record] = service.core.block_events
            for _ in range(MAX_EVENTS):
                record.stored(b"k" * 32, BlockContent(None, b""), Tier.GPU)
                record.removed(b"k" * 32, Tier.GPU)
            told = await read_all(stream)
            assert told[-1].error.code == openengine_pb2.ERROR_CODE_OVERLOADED

    async def test_a_rank_that_does_not_exist_is_refused(self):
        async with orchestrated({"kv_events": True}) as (_, _, control):
            request = SubscribeKvEventsRequest(data_parallel_ranks=[1])
            code = await status_of(control.SubscribeKvEvents(request).read())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
